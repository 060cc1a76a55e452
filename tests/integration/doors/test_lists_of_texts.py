"""Lists of texts as one input of sentence-embedding: over gRPC and HTTP, for static embeddings and for an encoder."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from model2vec import StaticModel

from demo.processes import ServiceProcess
from neuronpipe.api.v1.inference_pb2 import InferRequest
from neuronpipe.api.v1.tasks_pb2 import EmbeddingPrecision, SentenceEmbeddingInput, TaskInput, Truncation
from neuronpipe.client import Client
from neuronpipe.core.errors import InvalidInput
from tests.models.compiling import compile_model
from tests.models.tokenizers import word_piece

_WIDTH = 24
_TEXTS = [
    f"The ferry to island {number} leaves at half past nine. {'It is late. ' * (number % 7)}" for number in range(300)
]
# Sums of numbers in another order.
_TOLERANCE = 2e-6


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of model2vec."""
    tokenizer = word_piece(max_tokens=64)._tokenizer
    shape = tokenizer.get_vocab_size(), _WIDTH
    vectors = np.random.default_rng(5).standard_normal(shape).astype(np.float32)
    folder = tmp_path_factory.mktemp("static") / "source"
    StaticModel(vectors, tokenizer, config={"model_type": "model2vec"}, normalize=True).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def served(source: Path) -> Iterator[ServiceProcess]:
    """The model in one process."""
    repository = source.parent / "repository"
    compile_model(source, repository, name="static")
    with ServiceProcess("all", "--repository", str(repository), "--http-listen", "127.0.0.1:0") as process:
        yield process.wait_until_ready()


@pytest.mark.local_only
def test_a_list_for_static_embeddings_has_the_vectors_of_model2vec(source: Path, served: ServiceProcess) -> None:
    expected = StaticModel.from_pretrained(source).encode(_TEXTS)
    with Client(served.target) as client:
        np.testing.assert_allclose(client.embed_texts("static", _TEXTS), expected, rtol=0, atol=_TOLERANCE)
        one = client.embed_texts("static", _TEXTS[:1], dimensions=8)
        assert one.shape == (1, 8)
        binary = EmbeddingPrecision.EMBEDDING_PRECISION_UBINARY
        bits = client.embed_texts("static", _TEXTS, precision=binary)
        assert (bits == np.packbits(expected > 0, axis=1)).mean() > 0.999  # a number may be next to zero
        input = SentenceEmbeddingInput(texts=_TEXTS, truncation_tokens=5, truncation=Truncation.TRUNCATION_RIGHT)
        response = client.infer(InferRequest(model="static", input=TaskInput(sentence_embedding=input)))
        assert response.usage.tokens == 5 * len(_TEXTS)
        assert response.usage.truncated_tokens > 5 * len(_TEXTS)
        assert response.usage.batch_size > 32
        assert response.timings.predict_compute_ns > 0
        with pytest.raises(InvalidInput, match=r"texts\[1\]: is empty, and has no tokens"):
            client.embed_texts("static", ["a", ""])


@pytest.mark.local_only
def test_a_list_over_http_has_the_vectors_and_tokens_of_its_texts(source: Path, served: ServiceProcess) -> None:
    expected = StaticModel.from_pretrained(source).encode(_TEXTS)
    address = served.wait_for("listening for HTTP")["address"]
    content = httpx.post(
        f"http://{address}/v1/embeddings", json={"model": "static", "input": _TEXTS}, timeout=30
    ).json()
    assert [one["index"] for one in content["data"]] == list(range(len(_TEXTS)))
    vectors = np.array([one["embedding"] for one in content["data"]])
    np.testing.assert_allclose(vectors, expected, rtol=0, atol=_TOLERANCE)
    with Client(served.target) as client:
        input = SentenceEmbeddingInput(texts=_TEXTS)
        response = client.infer(InferRequest(model="static", input=TaskInput(sentence_embedding=input)))
    assert content["usage"]["total_tokens"] == response.usage.tokens


def test_a_list_for_an_encoder_has_the_vectors_of_its_texts(gateway_target: str) -> None:
    texts = ["A fine day.", "The train to the coast is late again. " * 20, "ok"]
    with Client(gateway_target) as client:
        together = client.embed_texts("minilm", texts, max_chunks=4)
        alone = [client.embed("minilm", text, max_chunks=4) for text in texts]
    np.testing.assert_allclose(together, alone, rtol=0, atol=1e-5)  # batches of other shapes
