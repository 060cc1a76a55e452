"""tei.v1 against a caller with TEI's published proto: it reads out of our answers what our own client gets."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto

from demo.processes import four_processes
from neuronpipe.api.tei.v1 import tei_pb2
from neuronpipe.client import Client
from tests.suite.commands import output
from tests.systems.http_server import HttpServer

pytestmark = pytest.mark.local_only

_TEXT = "Ann lives in a house in Paris."
# float32 as decimals, and what a batch of another shape changes.
_TOLERANCE = 1e-6
_TWO = ["A fine day.", "Lovely weather."]
_INVALID = "INVALID_ARGUMENT"

Ask = Callable[..., dict[str, Any]]


@contextmanager
def _caller(target: str) -> Iterator[Ask]:
    command = [sys.executable, "-m", "tests.callers.tei", target]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout
        questions, answers = process.stdin, process.stdout

        def ask(rpc: str, *messages: dict[str, Any], **metadata: str) -> dict[str, Any]:
            named = {name.replace("_", "-"): value for name, value in metadata.items()}
            questions.write(json.dumps({"rpc": rpc, "messages": messages, "metadata": named}) + "\n")
            questions.flush()
            answer: dict[str, Any] = json.loads(answers.readline())
            return answer

        try:
            yield ask
        finally:
            questions.close()


@pytest.fixture(scope="module")
def ask(http_server: HttpServer) -> Iterator[Ask]:
    with _caller(http_server.process.target) as ask:
        yield ask


def _only(answer: dict[str, Any]) -> dict[str, Any]:
    assert "code" not in answer, answer
    (message,) = answer["messages"]
    found: dict[str, Any] = message
    return found


def test_embed(ask: Ask, ours: Client) -> None:
    message = _only(ask("Embed/Embed", {"inputs": _TEXT}))
    np.testing.assert_allclose(message["embeddings"], ours.embed("minilm", _TEXT), atol=_TOLERANCE)
    metadata = message["metadata"]
    assert (metadata["compute_chars"], metadata["compute_tokens"]) == (len(_TEXT), 10)
    assert int(metadata["total_time_ns"]) > int(metadata["tokenization_time_ns"]) > 0


def test_embed_stream_answers_in_order(ask: Ask, ours: Client) -> None:
    texts = [f"text {number} " * (number % 7 + 1) for number in range(100)]
    answer = ask("Embed/EmbedStream", *({"inputs": text} for text in texts))
    assert len(answer["messages"]) == len(texts)
    for text, message in zip(texts, answer["messages"], strict=True):
        np.testing.assert_allclose(message["embeddings"], ours.embed("minilm", text), atol=_TOLERANCE)


def test_a_stream_ends_at_its_first_error_after_the_answers_before(ask: Ask) -> None:
    answer = ask("Embed/EmbedStream", {"inputs": "a"}, {"inputs": "\0"}, {"inputs": "b"})
    assert (len(answer["messages"]), answer["code"]) == (1, _INVALID)
    assert answer["details"] == "inputs: has the character NUL at position 0"


def test_embed_all(ask: Ask, ours: Client) -> None:
    message = _only(ask("Embed/EmbedAll", {"inputs": _TEXT}, neuronpipe_model="extractor"))
    vectors = [embedding["embeddings"] for embedding in message["token_embeddings"]]
    np.testing.assert_allclose(vectors, ours.extract_features("extractor", _TEXT), atol=_TOLERANCE)
    streamed = ask("Embed/EmbedAllStream", {"inputs": _TEXT}, {"inputs": "a"})["messages"]
    assert [len(answer["token_embeddings"]) for answer in streamed] == [len(vectors), 3]


def test_sparse_vectors_are_for_models_that_make_them(ask: Ask) -> None:
    for rpc in ("Embed/EmbedSparse", "Embed/EmbedSparseStream"):
        answer = ask(rpc, {"inputs": "a"}, neuronpipe_model="minilm")
        assert answer["code"] == "FAILED_PRECONDITION"
        assert answer["details"].startswith("model 'minilm' supports sentence-embedding")


def _labels(scored: Any) -> dict[str, Any]:
    return {label.label: pytest.approx(label.score, abs=_TOLERANCE) for label in scored}


def test_predict(ask: Ask, ours: Client) -> None:
    expected = _labels(ours.classify("classifier", _TEXT, top_k=4))
    found = _only(ask("Predict/Predict", {"inputs": _TEXT}))["predictions"]
    assert {label["label"]: label["score"] for label in found} == expected
    pair = _only(ask("Predict/PredictPair", {"inputs": _TWO}))["predictions"]
    assert {label["label"]: label["score"] for label in pair} == _labels(ours.classify("classifier", *_TWO, top_k=4))
    assert ask("Predict/PredictPair", {"inputs": ["a", ""]})["details"].startswith("inputs: the second text is empty")
    assert len(ask("Predict/PredictStream", {"inputs": "a"}, {"inputs": "b"})["messages"]) == 2
    assert len(ask("Predict/PredictPairStream", {"inputs": _TWO}, {"inputs": _TWO})["messages"]) == 2


def test_rerank(ask: Ask, ours: Client) -> None:
    texts = ["A dog ran.", "A cat sat.", "Nobody."]
    expected = [
        (rank.index, texts[rank.index], pytest.approx(rank.score, abs=_TOLERANCE))
        for rank in ours.rerank("reranker", "Who sat?", texts)
    ]

    def ranks(answer: dict[str, Any]) -> list[tuple[int, str, Any]]:
        # JSON leaves out an index of 0.
        return [(rank.get("index", 0), rank["text"], rank["score"]) for rank in _only(answer)["ranks"]]

    assert ranks(ask("Rerank/Rerank", {"query": "Who sat?", "texts": texts, "return_text": True})) == expected
    streamed = [{"query": "Who sat?", "text": text} for text in texts]
    streamed[0]["return_text"] = True  # type: ignore[assignment]
    assert ranks(ask("Rerank/RerankStream", *streamed)) == expected
    plain = _only(ask("Rerank/Rerank", {"query": "Who sat?", "texts": texts}))["ranks"]
    assert all("text" not in rank for rank in plain)


def test_a_stream_of_two_queries_is_refused(ask: Ask) -> None:
    answer = ask("Rerank/RerankStream", {"query": "a", "text": "b"}, {"query": "b", "text": "b"})
    assert (answer["code"], answer["details"]) == (_INVALID, "query: must be the same in every message of a stream")


def test_a_stream_has_as_many_texts_as_a_request_may_have(ask: Ask) -> None:
    answer = ask("Rerank/RerankStream", *[{"query": "", "text": ""}] * 1025)
    assert (answer["code"], answer["details"]) == (_INVALID, "texts: more than 1024 texts, the limit")


def test_tokenize_and_decode(ask: Ask, ours: Client) -> None:
    tokens = _only(ask("Tokenize/Tokenize", {"inputs": "Ä day.", "add_special_tokens": True}))["tokens"]
    first, *inner, last = tokens
    assert [token["id"] for token in tokens] == [token.token_id for token in ours.tokenize("minilm", "Ä day.")]
    assert (first["text"], first["special"], last["text"]) == ("[CLS]", True, "[SEP]")
    assert not {"start", "stop"} & set(first)
    # The umlaut takes two bytes; JSON shows a start of 0 that is set.
    places = [(token["text"], token["start"], token["stop"]) for token in inner]
    assert places == [("Ä", 0, 2), ("day", 3, 6), (".", 6, 7)]
    bare = _only(ask("Tokenize/Tokenize", {"inputs": "Ä day."}))["tokens"]
    assert [token["id"] for token in bare] == [token["id"] for token in inner]
    ids = [token["id"] for token in tokens]
    assert _only(ask("Tokenize/Decode", {"ids": ids, "skip_special_tokens": True})) == {"text": "a day."}
    both = ask("Tokenize/DecodeStream", {"ids": ids}, {"ids": ids[1:2]})["messages"]
    assert [answer["text"] for answer in both] == ["[CLS] a day. [SEP]", "a"]
    assert len(ask("Tokenize/TokenizeStream", {"inputs": "a"}, {"inputs": "b"})["messages"]) == 2


def test_info(ask: Ask) -> None:
    info = _only(ask("Info/Info", {}))
    assert (info["model_id"], info["model_dtype"], info["max_input_length"]) == ("minilm", "float32", 256)
    kinds = {
        name: _only(ask("Info/Info", {}, neuronpipe_model=name)).get("model_type", "MODEL_TYPE_EMBEDDING")
        for name in ("minilm", "classifier", "reranker")
    }
    assert list(kinds.values()) == ["MODEL_TYPE_EMBEDDING", "MODEL_TYPE_CLASSIFIER", "MODEL_TYPE_RERANKER"]


@pytest.mark.parametrize(
    ("message", "metadata", "code", "details"),
    [
        ({"inputs": "word " * 600}, {}, _INVALID, "inputs: 602 tokens, the model takes 256; set truncate to cut"),
        ({"prompt_name": "query"}, {}, _INVALID, "prompt_name: is none of the model's prompts; they are: none"),
        ({}, {"neuronpipe_model": "classifier"}, "FAILED_PRECONDITION", ""),
        ({}, {"neuronpipe_model": "none"}, "NOT_FOUND", ""),
        ({}, {"neuronpipe_version": "7"}, "NOT_FOUND", "model 'minilm' has no version 7; it has: 1"),
        ({}, {"neuronpipe_priority": "high"}, _INVALID, "neuronpipe-priority: must be interactive or bulk"),
    ],
)
def test_errors(ask: Ask, message: dict[str, Any], metadata: dict[str, str], code: str, details: str) -> None:
    answer = ask("Embed/Embed", {"inputs": "a"} | message, **metadata)
    assert answer["code"] == code
    assert details in answer["details"]


def test_a_text_that_is_too_long_is_cut_where_asked(ask: Ask) -> None:
    for direction in ("TRUNCATION_DIRECTION_RIGHT", "TRUNCATION_DIRECTION_LEFT"):
        message = {"inputs": "word " * 600, "truncate": True, "truncation_direction": direction}
        assert _only(ask("Embed/Embed", message, neuronpipe_priority="bulk"))["metadata"]["compute_tokens"] == 256


def test_stages_in_other_processes_answer_as_well(http_repository: Any, ours: Client) -> None:
    with four_processes(http_repository) as processes, _caller(processes["gateway"].target) as ask:
        message = _only(ask("Embed/Embed", {"inputs": _TEXT}, neuronpipe_model="minilm"))
        np.testing.assert_allclose(message["embeddings"], ours.embed("minilm", _TEXT), atol=_TOLERANCE)
        output("health", "--target", processes["gateway"].target, "--service", "tei.v1.Embed")
        tokens = _only(ask("Tokenize/Tokenize", {"inputs": _TEXT}, neuronpipe_model="minilm"))["tokens"]
        assert [token["text"] for token in tokens[:3]] == ["Ann", "lives", "in"]


def test_names_and_numbers_are_those_of_the_published_proto() -> None:
    """Of a release of its; a later one has more fields."""
    script = (
        "import sys; from tei_client.stubs import tei_pb2; sys.stdout.buffer.write(tei_pb2.DESCRIPTOR.serialized_pb)"
    )
    published = FileDescriptorProto.FromString(
        subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout
    )
    own = FileDescriptorProto.FromString(tei_pb2.DESCRIPTOR.serialized_pb)
    assert published.package == own.package
    theirs, ours = _fields(published), _fields(own)
    assert theirs == {name: ours[name] for name in theirs if name in ours}
    assert set(ours) - set(theirs) == {"EmbedRequest.dimensions"}
    assert [service.SerializeToString() for service in published.service] == [
        service.SerializeToString() for service in own.service
    ]
    assert [enum.SerializeToString() for enum in published.enum_type] == [
        enum.SerializeToString() for enum in own.enum_type
    ]


def _fields(file: FileDescriptorProto) -> dict[str, tuple[Any, ...]]:
    def described(field: FieldDescriptorProto) -> tuple[Any, ...]:
        return field.number, field.type, field.label, field.type_name

    return {
        f"{message.name}.{field.name}": described(field) for message in file.message_type for field in message.field
    }
