"""What every system does, whether its stages are near or far. Also runs against `--target=HOST:PORT`."""

import pydoc_data.topics
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from google.rpc import code_pb2

from neuronpipe.api.v1.inference_pb2 import InferRequest
from neuronpipe.api.v1.tasks_pb2 import Aggregation, TaskInput, Truncation
from neuronpipe.core.errors import DeadlineExceeded, InvalidInput, ModelNotFound, NeuronpipeError, WrongTask
from tests.callers.requests import answer, classify, embed, fill, tag
from tests.systems.pipelines import System


def _input(model: str, **task: Any) -> InferRequest:
    return InferRequest(model=model, input=TaskInput(**task))


TEXTS = [
    "The cat sat on the mat.",
    "Ein Kätzchen 🐈 saß auf der Matte.",
    "猫坐在垫子上",
    "a",
    pydoc_data.topics.topics["if"][:900],
]


@cache
def _pipeline(source: Path) -> Any:
    """Loads it once for all systems and texts."""
    return transformers.pipeline("text-classification", model=str(source))


@cache
def _sentence_transformer(source: Path) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(source), device="cpu")


@pytest.mark.parametrize("text", TEXTS)
async def test_classification_equals_the_transformers_pipeline(
    system: System, sources: dict[str, Path], text: str
) -> None:
    expected = _pipeline(sources["classifier"])(text, top_k=4)
    response = await system.infer(classify(text, top_k=4))
    labels = response.result.text_classification.labels
    assert [label.label for label in labels] == [entry["label"] for entry in expected]
    # float32 through two layers: the sums run in another order.
    assert [label.score for label in labels] == pytest.approx([entry["score"] for entry in expected], abs=1e-5)


@pytest.mark.parametrize("text", TEXTS)
async def test_embedding_equals_sentence_transformers(system: System, sources: dict[str, Path], text: str) -> None:
    expected = _sentence_transformer(sources["minilm"]).encode(text, normalize_embeddings=True)
    response = await system.infer(embed(text))
    # float32 through six layers; vectors have length one.
    np.testing.assert_allclose(response.result.sentence_embedding.embedding, expected, atol=2e-6)


@pytest.mark.parametrize("text", TEXTS)
async def test_tokens_are_those_of_transformers_and_as_an_input_give_the_texts_vector(
    system: System, sources: dict[str, Path], text: str
) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(sources["minilm"])
    expected = tokenizer(text, return_offsets_mapping=True, return_special_tokens_mask=True)
    response = await system.infer(_input("minilm", tokenization={"text": text}))
    tokens = response.result.tokenization.tokens
    assert [token.token_id for token in tokens] == expected["input_ids"]
    assert [token.is_special for token in tokens] == [bool(mask) for mask in expected["special_tokens_mask"]]
    assert [(token.start, token.end) for token in tokens] == expected["offset_mapping"]
    assert all(token.text == text[token.start : token.end] for token in tokens if not token.is_special)
    assert (response.usage.tokens, response.timings.predict_compute_ns) == (0, 0)
    ids = [token.token_id for token in tokens]
    by_ids = await system.infer(_input("minilm", sentence_embedding={"token_ids": ids}))
    by_text = await system.infer(embed(text))
    np.testing.assert_allclose(
        by_ids.result.sentence_embedding.embedding, by_text.result.sentence_embedding.embedding, atol=2e-6
    )
    assert by_ids.usage.tokens == by_text.usage.tokens == len(ids)
    joined = await system.infer(_input("minilm", detokenization={"token_ids": ids, "skip_special_tokens": True}))
    assert joined.result.detokenization.text == tokenizer.decode(
        ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


async def test_answers_are_passages_of_the_context_by_code_points(system: System) -> None:
    context = "🐈 Kätzchen schlafen gern. In der Küche steht ein Napf. " * 60
    response = await system.infer(answer("Where is the bowl?", context, top_k=5))
    answers = response.result.question_answering.answers
    assert len(answers) == 5
    assert [context[found.start : found.end] for found in answers] == [found.text for found in answers]
    assert [found.score for found in answers] == sorted((found.score for found in answers), reverse=True)
    assert response.usage.tokens > 384, "the context should take several windows"


async def test_entities_are_passages_of_the_text_by_code_points(system: System) -> None:
    text = "🐈 Kätzchen schlafen gern. In der Küche steht ein Napf. " * 60
    response = await system.infer(tag(text, aggregation=Aggregation.AGGREGATION_FIRST, window_stride_tokens=50))
    entities = response.result.token_classification.entities
    assert len(entities) > 60
    assert [text[entity.start : entity.end] for entity in entities] == [entity.text for entity in entities]
    assert [entity.start for entity in entities] == sorted({entity.start for entity in entities})
    assert response.usage.tokens > 512, "the text should take several windows"


async def test_every_mask_is_filled_where_it_stands(system: System) -> None:
    text = "🐈 [MASK] on the [MASK]."
    response = await system.infer(fill(text, top_k=3, targets=["sat", "mat", "dog", "##s"]))
    masks = response.result.fill_mask.masks
    assert [text[mask.start : mask.end] for mask in masks] == ["[MASK]", "[MASK]"]
    assert all(
        {token.token for token in mask.tokens} < {"sat", "mat", "dog", "##s"} and len(mask.tokens) == 3
        for mask in masks
    )
    assert list(masks[0].tokens) != list(masks[1].tokens), "each mask has a place of its own"
    # Two sequences of [CLS] 🐈 [MASK] on the [MASK] . [SEP].
    assert response.usage.tokens == 2 * 8


async def test_a_blank_text_has_an_empty_result(system: System) -> None:
    tagged, answered = await system.infer(tag(" \n")), await system.infer(answer("Who?", "  \n "))
    assert not tagged.result.token_classification.entities
    assert not answered.result.question_answering.answers


async def test_timings_add_up_and_usage_tells_what_ran(system: System) -> None:
    response = await system.infer(classify("The cat sat on the mat."))
    timings = response.timings
    stages_ns = timings.preprocess_ns + timings.predict_ns + timings.postprocess_ns
    assert 0 < stages_ns <= timings.total_ns
    assert timings.predict_compute_ns > 0
    assert timings.predict_queue_ns + timings.predict_compute_ns <= timings.predict_ns
    # [CLS] the cat sat on the mat . [SEP]
    assert response.usage.tokens == 9
    assert response.usage.batch_size >= 1
    assert response.usage.bucket_tokens >= 9


async def test_response_names_model_version_and_request(system: System) -> None:
    response = await system.infer(classify("a", request_id="the-first"))
    assert (response.model, response.version, response.request_id) == ("classifier", "1", "the-first")


async def test_request_without_an_id_gets_one(system: System) -> None:
    first, second = await system.infer(classify("a")), await system.infer(classify("a"))
    assert first.request_id
    assert first.request_id != second.request_id


async def test_truncation_is_counted(system: System) -> None:
    text = "word " * 600
    response = await system.infer(classify(text, truncation=Truncation.TRUNCATION_RIGHT))
    # 600 words and two special tokens, of which 512 fit.
    assert (response.usage.tokens, response.usage.truncated_tokens) == (512, 90)


BAD_REQUESTS: dict[str, tuple[InferRequest, type[NeuronpipeError], str]] = {
    "empty text": (classify(""), InvalidInput, "text: is empty"),
    "NUL": (classify("a\0b"), InvalidInput, "text: has the character NUL at position 1"),
    "too long": (classify("word " * 600), InvalidInput, "text: 602 tokens, the model takes 512"),
    "too long pair": (
        classify("word " * 300, text_pair="word " * 300),
        InvalidInput,
        "text and text_pair: 603 tokens, the model takes 512",
    ),
    "10 MB of text": (classify("x" * 10_000_000), InvalidInput, r"input: 100000\d\d bytes, the limit is 1048576"),
    "no model": (classify("a", model=""), InvalidInput, "model: is empty"),
    "unknown model": (
        classify("a", model="nobody"),
        ModelNotFound,
        "model 'nobody' is not served; the served models are: .*classifier",
    ),
    "unknown version": (classify("a", version="7"), ModelNotFound, "model 'classifier' has no version 7; it has: 1"),
    "another task": (
        embed("a", model="classifier"),
        WrongTask,
        "model 'classifier' supports text-classification, not sentence-embedding",
    ),
    "no input": (
        InferRequest(model="classifier"),
        InvalidInput,
        "input: holds no task; model 'classifier' takes text_classification",
    ),
    "no task": (InferRequest(model="classifier", input=TaskInput()), InvalidInput, "input: holds no task"),
    "top_k above labels": (classify("a", top_k=5), InvalidInput, "top_k: 5, the model has 4 labels"),
    "dimensions above width": (embed("a", dimensions=385), InvalidInput, "dimensions: 385, the model has 384"),
    "too many windows": (
        answer("who?", "word " * 2000, window_stride_tokens=378),
        InvalidInput,
        "context: makes 1622 windows with an overlap of 378 tokens, the limit is 1024",
    ),
    "text to tag is too long": (
        tag("word " * 600),
        InvalidInput,
        "text: 602 tokens, the model takes 512; set truncation to cut, or window",
    ),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
async def test_bad_input_gets_an_error_that_names_the_thing_and_the_limit(system: System, name: str) -> None:
    request, error, message = BAD_REQUESTS[name]
    with pytest.raises(error) as caught:
        await system.infer(request)
    assert re.match(message, caught.value.message), caught.value.message


async def test_bad_item_of_a_batch_fails_alone(system: System) -> None:
    requests = [classify("good"), classify(""), classify("a", model="nobody"), classify("good")]
    outcomes = await system.infer_batch(requests)
    assert [outcome.WhichOneof("outcome") for outcome in outcomes] == ["response", "error", "error", "response"]
    assert [outcomes[1].error.code, outcomes[2].error.code] == [code_pb2.INVALID_ARGUMENT, code_pb2.NOT_FOUND]
    assert outcomes[0].response.result == outcomes[3].response.result


async def test_batch_answers_in_the_order_of_its_requests(system: System) -> None:
    requests = [classify("word " * length, request_id=str(length)) for length in (300, 1, 40, 5, 200)]
    outcomes = await system.infer_batch(requests)
    assert [outcome.response.request_id for outcome in outcomes] == ["300", "1", "40", "5", "200"]
    assert [outcome.response.usage.tokens for outcome in outcomes] == [302, 3, 42, 7, 202]


@pytest.mark.parametrize("count", [0, 257])
async def test_batch_size_is_limited(system: System, count: int) -> None:
    with pytest.raises(InvalidInput, match=f"requests: {count} requests, a batch takes 1 to 256"):
        await system.infer_batch([classify("a")] * count)


async def test_stream_answers_every_request_by_its_id(system: System) -> None:
    requests = [classify("word " * (1 + index % 7), request_id=f"r{index}") for index in range(200)]
    requests[13] = classify("", request_id="r13")
    answers = {response.request_id: response.outcome async for response in system.infer_stream(requests)}
    assert answers.keys() == {f"r{index}" for index in range(200)}
    assert answers.pop("r13").error.code == code_pb2.INVALID_ARGUMENT
    assert {outcome.WhichOneof("outcome") for outcome in answers.values()} == {"response"}
    assert answers["r6"].response.usage.tokens == 9


async def test_deadline_that_cannot_be_met_is_exceeded_and_the_system_answers_afterwards(system: System) -> None:
    with pytest.raises(DeadlineExceeded):
        await system.infer(answer("Where?", "A long context. " * 5000), timeout_s=0.02)
    assert (await system.infer(classify("a"))).result.text_classification.labels


async def test_models_are_listed_with_what_they_take(system: System) -> None:
    models = {model.name: model for model in await system.list_models()}
    classifier, minilm = models["classifier"], models["minilm"]
    assert (classifier.task, list(classifier.labels)) == ("text_classification", ["calm", "busy", "lost", "found"])
    assert (classifier.version, classifier.is_default, classifier.max_tokens) == ("1", True, 512)
    assert (minilm.task, minilm.embedding_dimensions, minilm.max_tokens) == ("sentence_embedding", 384, 256)
    assert (minilm.architecture, list(minilm.backends), minilm.dtype) == ("BertModel", ["openvino"], "float32")
    assert len(minilm.digest) == 64


async def test_one_model_is_described_as_in_the_list(system: System) -> None:
    alone = await system.get_model("minilm", "1")
    listed = next(model for model in await system.list_models() if model.name == "minilm")
    assert alone.shapes_ready <= listed.shapes_ready <= listed.shapes  # shapes are compiled between the two calls, too
    alone.ClearField("shapes_ready")
    listed.ClearField("shapes_ready")
    assert alone == listed


async def test_unknown_model_is_not_described(system: System) -> None:
    with pytest.raises(ModelNotFound, match="model 'nobody' is not served"):
        await system.get_model("nobody")
