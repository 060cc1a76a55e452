"""The clients that people have, against the HTTP door: they read out of our answers what our own client gets."""

import asyncio
import base64
import io
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cohere
import huggingface_hub
import numpy as np
import openai
import pytest
import torch
import transformers
from PIL import Image

from neuronpipe.api.v1.tasks_pb2 import EmbeddingPrecision
from neuronpipe.client import Client
from tests.models.compiling import compile_model
from tests.models.images import make_image_text_source
from tests.systems.http_server import HttpServer, running_http_server

pytestmark = [pytest.mark.local_only, pytest.mark.sampled]

_TEXT = "Ann lives in a house in Paris."
# float32 as decimals, and what a batch of another shape changes.
_TOLERANCE = 1e-6


@pytest.fixture
def openai_client(http_server: HttpServer) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{http_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def hub(http_server: HttpServer) -> Callable[[str], Any]:
    """Hugging Face's client of a model."""
    return lambda model: huggingface_hub.InferenceClient(model=f"{http_server.url}/models/{model}")


def _labels(scored: Any) -> dict[str, Any]:
    return {label.label: pytest.approx(label.score, abs=_TOLERANCE) for label in scored}


@pytest.mark.parametrize("options", [{}, {"encoding_format": "float"}, {"dimensions": 7}], ids=str)
def test_openai_embeddings(openai_client: Any, ours: Client, options: dict[str, Any]) -> None:
    texts = [_TEXT, "Another."]
    answer = openai_client.embeddings.create(
        model="minilm", input=texts, user="somebody", **options
    )  # Base64, unless told otherwise
    for text, entry in zip(texts, answer.data, strict=True):
        vector = ours.embed("minilm", text, dimensions=options.get("dimensions", 0))
        np.testing.assert_allclose(entry.embedding, vector, atol=_TOLERANCE)
    assert answer.usage.total_tokens > 0


def test_openai_token_ids(openai_client: Any, ours: Client) -> None:
    ids = [token.token_id for token in ours.tokenize("minilm", _TEXT)]
    for given in (ids, [ids]):
        answer = openai_client.embeddings.create(model="minilm", input=given)
        np.testing.assert_allclose(answer.data[0].embedding, ours.embed("minilm", _TEXT), atol=_TOLERANCE)
        assert answer.usage.total_tokens == len(ids)


def test_openai_headers_name_a_version_and_a_priority(openai_client: Any) -> None:
    headers = {"neuronpipe-version": "1", "neuronpipe-priority": "bulk"}
    answer = openai_client.embeddings.create(model="minilm", input="a", extra_headers=headers)
    assert len(answer.data[0].embedding) == 384
    with pytest.raises(openai.NotFoundError):
        openai_client.embeddings.create(model="minilm", input="a", extra_headers={"neuronpipe-version": "7"})


async def test_openai_without_waiting(http_server: HttpServer) -> None:
    async with openai.AsyncOpenAI(base_url=f"{http_server.url}/v1", api_key="none") as client:
        answers = await asyncio.gather(
            *(client.embeddings.create(model="minilm", input=f"text {number}") for number in range(20))
        )
    assert {len(answer.data[0].embedding) for answer in answers} == {384}


def test_openai_models(openai_client: Any, ours: Client) -> None:
    assert [model.id for model in openai_client.models.list()] == [model.name for model in ours.list_models()]
    assert openai_client.models.retrieve("minilm").id == "minilm"


def test_openai_moderations(openai_client: Any, ours: Client) -> None:
    texts = [_TEXT, "Another."]
    answer = openai_client.moderations.create(model="classifier", input=texts)
    for result, text in zip(answer.results, texts, strict=True):
        scores = _labels(ours.classify("classifier", text, top_k=4))
        assert result.category_scores.to_dict() == scores
        assert result.flagged == any(label.score >= 0.5 for label in ours.classify("classifier", text))
    with pytest.raises(openai.BadRequestError):
        openai_client.moderations.create(model="minilm", input=_TEXT)


def test_openai_errors(openai_client: Any) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        openai_client.embeddings.create(model="unknown", input="a")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as ids:
        openai_client.embeddings.create(model="minilm", input=[[1], [30_522]])
    assert (ids.value.param, ids.value.code) == ("input[1]", "invalid_input")
    with pytest.raises(openai.BadRequestError) as task:
        openai_client.embeddings.create(model="classifier", input="a")
    assert task.value.code == "wrong_task"


@pytest.mark.parametrize("version", ["Client", "ClientV2"])
def test_cohere(http_server: HttpServer, ours: Client, version: str) -> None:
    documents = ["A dog ran.", "A cat sat.", "Nobody."]
    with getattr(cohere, version)(api_key="none", base_url=http_server.url) as client:
        answer = client.rerank(model="reranker", query="Who sat?", documents=documents, top_n=2)
        with pytest.raises(cohere.NotFoundError):
            client.rerank(model="unknown", query="Who sat?", documents=documents)
    ranked = ours.rerank("reranker", "Who sat?", documents, top_n=2)
    assert [(result.index, result.relevance_score) for result in answer.results] == [
        (rank.index, pytest.approx(rank.score, abs=_TOLERANCE)) for rank in ranked
    ]


def test_coheres_limits_of_documents(http_server: HttpServer, ours: Client) -> None:
    asked: dict[str, Any] = {"model": "reranker", "query": "Who sat?", "documents": ["A cat sat on the mat.", "A dog."]}
    with cohere.ClientV2(api_key="none", base_url=http_server.url) as client:
        answer = client.rerank(**asked, max_tokens_per_doc=2)
    scores = {result.index: result.relevance_score for result in answer.results}
    limited, whole = (
        {
            rank.index: rank.score
            for rank in ours.rerank("reranker", asked["query"], asked["documents"], max_text_tokens=most)
        }
        for most in (2, 0)
    )
    assert scores == pytest.approx(limited, abs=_TOLERANCE)
    assert scores != pytest.approx(whole, abs=_TOLERANCE)
    long = {**asked, "documents": ["words " * 600 + "A cat sat."]}
    with cohere.Client(api_key="none", base_url=http_server.url) as client:
        (chunked,) = client.rerank(**long, max_chunks_per_doc=99).results
    (expected,) = ours.rerank("reranker", asked["query"], long["documents"], max_chunks=99)
    assert chunked.relevance_score == pytest.approx(expected.score, abs=_TOLERANCE)


def test_coheres_vectors(http_server: HttpServer, ours: Client) -> None:
    asked: dict[str, Any] = {"model": "minilm", "texts": [_TEXT, "Another."], "input_type": "search_query"}
    with cohere.ClientV2(api_key="none", base_url=http_server.url) as client:
        default = client.embed(**asked)
        short = client.embed(**asked, embedding_types=["float", "ubinary"], output_dimension=16)
        with pytest.raises(cohere.BadRequestError, match="output_dimension: 999, the model has 384"):
            client.embed(**asked, output_dimension=999)

    def vectors(**options: Any) -> list[Any]:
        return [ours.embed("minilm", text, **options) for text in asked["texts"]]

    np.testing.assert_allclose(default.embeddings.float_, vectors(), atol=_TOLERANCE)
    np.testing.assert_allclose(short.embeddings.float_, vectors(dimensions=16), atol=_TOLERANCE)
    packed = vectors(dimensions=16, precision=EmbeddingPrecision.EMBEDDING_PRECISION_UBINARY)
    np.testing.assert_array_equal(short.embeddings.ubinary, packed)
    assert short.meta.billed_units.input_tokens > len(asked["texts"])


@pytest.mark.parametrize("family", ["CLIP", "SigLIP"])
def test_vectors_of_images_by_the_protocols_of_texts(family: str, image: bytes, tmp_path: Path) -> None:
    source = make_image_text_source(tmp_path / "source", family)
    compile_model(source, tmp_path / "repository", "", name="matcher")
    model, encoded = transformers.AutoModel.from_pretrained(source), base64.b64encode(image).decode()
    processor = transformers.AutoImageProcessor.from_pretrained(source, backend="pil")
    with torch.no_grad():
        outputs = model.get_image_features(**processor(Image.open(io.BytesIO(image)), return_tensors="pt"))
    features = getattr(outputs, "pooler_output", outputs)[0].numpy()
    expected = features / np.linalg.norm(features)
    url = f"data:image/png;base64,{encoded}"
    content = [{"type": "image_url", "image_url": {"url": url}}]
    messages = {"messages": [{"role": "user", "content": content}], "input": None}
    with running_http_server(tmp_path / "repository") as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            answer = client.embeddings.create(model="matcher", input=[{"image": encoded}, {"image": url}, content[0]])
            chat = client.embeddings.create(model="matcher", input="", extra_body=messages)
        with cohere.ClientV2(api_key="none", base_url=server.url) as cohere_client:
            asked = {"model": "matcher", "input_type": "image", "embedding_types": ["float"]}
            vectors = cohere_client.embed(**asked, images=[url]).embeddings.float_
            vectors += cohere_client.embed(**asked, inputs=[{"content": content}]).embeddings.float_
    for vector in (*(entry.embedding for entry in (*answer.data, *chat.data)), *vectors):
        np.testing.assert_allclose(vector, expected, atol=1e-5)


def test_what_clients_expect_and_do_not_get(
    http_server: HttpServer, hub: Callable[[str], Any], openai_client: Any
) -> None:
    """As the table of docs/clients.md says."""
    with pytest.raises(openai.NotFoundError):
        openai_client.images.generate(model="minilm", prompt="Who sat?")
    with pytest.raises(openai.BadRequestError, match="supports sentence-embedding"):
        openai_client.chat.completions.create(model="minilm", messages=[{"role": "user", "content": "Who sat?"}])
    with cohere.ClientV2(api_key="none", base_url=http_server.url) as client, pytest.raises(cohere.NotFoundError):
        client.chat(model="minilm", messages=[{"role": "user", "content": "Who sat?"}])
    with (
        cohere.Client(api_key="none", base_url=http_server.url) as client,
        pytest.raises(cohere.BadRequestError, match="rank_fields"),
    ):
        client.rerank(model="reranker", query="Who sat?", documents=["a"], rank_fields=["title"])
    with pytest.raises(huggingface_hub.errors.HfHubHTTPError, match="prompt_name: is none of the model's prompts"):
        hub("minilm").feature_extraction(_TEXT, prompt_name="query")
    with pytest.raises(huggingface_hub.errors.HfHubHTTPError, match=r"parameters\.max_seq_len: is not supported"):
        hub("answerer").question_answering(question="Who?", context=_TEXT, max_seq_len=9)
    labels = {label.label for label in hub("classifier").text_classification(_TEXT)}
    assert {label["label"] for label in hub("classifier").summarization(_TEXT)} == labels


def test_hub_text_classification(hub: Callable[[str], Any], ours: Client) -> None:
    answer = hub("classifier").text_classification(_TEXT, top_k=2)
    assert {label.label: label.score for label in answer} == _labels(ours.classify("classifier", _TEXT, top_k=2))


def test_hub_zero_shot_classification(hub: Callable[[str], Any], ours: Client) -> None:
    answer = hub("entailer").zero_shot_classification(
        _TEXT, ["home", "work"], multi_label=True, hypothesis_template="It is {}."
    )
    expected = ours.classify_zero_shot(
        "entailer", _TEXT, ["home", "work"], hypothesis_template="It is {}.", multi_label=True
    )
    assert {label.label: label.score for label in answer} == _labels(expected)


def test_hub_token_classification(hub: Callable[[str], Any], ours: Client) -> None:
    answer = hub("tagger").token_classification(_TEXT)
    expected = ours.find_entities("tagger", _TEXT)
    assert [(entity.entity_group, entity.word, entity.start, entity.end) for entity in answer] == [
        (entity.label, entity.text, entity.start, entity.end) for entity in expected
    ]


def test_hub_fill_mask(hub: Callable[[str], Any], ours: Client) -> None:
    text = "Ann lives in [MASK]."
    answer = hub("filler").fill_mask(text, top_k=3)
    expected = ours.fill_masks("filler", text, top_k=3)[0].tokens
    assert [(guess.token, guess.token_str) for guess in answer] == [(guess.token_id, guess.token) for guess in expected]
    assert answer[0].sequence == f"Ann lives in {expected[0].token}."


def test_hub_question_answering(hub: Callable[[str], Any], ours: Client) -> None:
    expected = ours.answer("answerer", "Who?", _TEXT, top_k=2)
    best = hub("answerer").question_answering(question="Who?", context=_TEXT)
    assert (best.answer, best.start, best.end) == (expected[0].text, expected[0].start, expected[0].end)
    found = hub("answerer").question_answering(question="Who?", context=_TEXT, top_k=2)
    assert [answer.answer for answer in found] == [answer.text for answer in expected]


def test_hub_feature_extraction(hub: Callable[[str], Any], ours: Client) -> None:
    np.testing.assert_allclose(hub("minilm").feature_extraction(_TEXT), ours.embed("minilm", _TEXT), atol=_TOLERANCE)
    vectors = hub("minilm").feature_extraction(_TEXT, normalize=False, truncate=True)
    np.testing.assert_allclose(vectors, ours.embed("minilm", _TEXT, normalize=False), atol=_TOLERANCE)
    np.testing.assert_allclose(
        hub("extractor").feature_extraction(_TEXT), ours.extract_features("extractor", _TEXT), atol=_TOLERANCE
    )


def test_hub_sentence_similarity(hub: Callable[[str], Any], ours: Client) -> None:
    answer = hub("minilm").sentence_similarity(_TEXT, other_sentences=[_TEXT, "Another."])
    np.testing.assert_allclose(answer, ours.compare("minilm", _TEXT, [_TEXT, "Another."]), atol=_TOLERANCE)


def test_hub_image_classification(hub: Callable[[str], Any], ours: Client, image: bytes, tmp_path: Path) -> None:
    file = tmp_path / "image.png"
    file.write_bytes(image)
    expected = _labels(ours.classify_image("viewer", image))
    assert {label.label: label.score for label in hub("viewer").image_classification(str(file))} == expected
    assert {
        label.label: label.score for label in hub("viewer").image_classification(image, top_k=3)
    } == expected  # Base64 in JSON


def test_hub_asks_for_the_health_of_an_endpoint(http_server: HttpServer) -> None:
    client = huggingface_hub.InferenceClient(model=http_server.url, provider="hf-inference")
    assert client.health_check()
    assert client.feature_extraction(_TEXT).shape == (384,)  # of the default model


def test_hub_errors(hub: Callable[[str], Any]) -> None:
    with pytest.raises(huggingface_hub.errors.HfHubHTTPError) as error:
        hub("unknown").text_classification(_TEXT)
    assert error.value.response.status_code == 404
    assert error.value.response.json()["error"].startswith("model 'unknown' is not served")


_JSON = ("-H", "Content-Type: application/json", "-d")


def _curl(*arguments: str) -> Any:
    return json.loads(subprocess.run(["curl", "--silent", *arguments], capture_output=True, check=True).stdout)


def test_curl_and_tei(http_server: HttpServer, ours: Client) -> None:
    body = json.dumps({"inputs": [_TEXT]})
    (vector,) = _curl(f"{http_server.url}/embed", *_JSON, body)
    np.testing.assert_allclose(vector, ours.embed("minilm", _TEXT), atol=_TOLERANCE)
    labels = _curl(f"{http_server.url}/predict", *_JSON, json.dumps({"inputs": _TEXT}))
    assert {label["label"]: label["score"] for label in labels} == _labels(ours.classify("classifier", _TEXT, top_k=4))


def test_curl_and_a_folder_that_is_a_bundle(http_repository: Path, tmp_path: Path) -> None:
    model = shutil.copytree(http_repository / "classifier" / "1", tmp_path / "model")  # as SageMaker unpacks an archive
    with running_http_server(model) as server:
        (labels,) = _curl(f"{server.url}/invocations", *_JSON, json.dumps({"inputs": [_TEXT]}))
    assert len(labels) == 4
