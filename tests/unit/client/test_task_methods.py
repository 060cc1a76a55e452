"""client/task_methods.py: one set of typed methods for both clients, and what they refuse before it is sent."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from inspect import Parameter
from pathlib import Path
from typing import Any, assert_type

import numpy as np
import pytest
from numpy.typing import NDArray

import neuronpipe.client
from neuronpipe.api.v1.inference_pb2 import InferRequest
from neuronpipe.api.v1.tasks_pb2 import (
    Aggregation,
    EmbeddingPrecision,
    FeatureExtractionResult,
    FeaturePooling,
    FeatureType,
    GeneratedText,
    GenerationOptions,
    LabelScore,
    TaskInput,
    TaskResult,
    TextSpan,
    TokenSequence,
    Truncation,
)
from neuronpipe.client import AsyncClient, Client, InvalidInput
from neuronpipe.client.task_methods import TaskMethods
from neuronpipe.core.errors import SetupError
from neuronpipe.core.generation_options import GenerationFields
from tests.unit.client.fake_gateway import FakeGateway, fake_gateway
from tests.unit.every_error import EVERY_ERROR
from tests.unit.task_messages import task_input, task_result

_METHODS = [name for name in vars(TaskMethods) if not name.startswith("_")]
_LEFT = Truncation.TRUNCATION_LEFT
_INT8, _FLOAT32 = FeatureType.FEATURE_TYPE_INT8, FeatureType.FEATURE_TYPE_FLOAT32


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    with fake_gateway() as gateway:
        gateway.answering.set()
        yield gateway


@pytest.fixture
def client(gateway: FakeGateway) -> Iterator[Client]:
    with Client(gateway.target) as client:
        yield client


def test_there_is_a_method_for_each_task() -> None:
    # Two tasks have a second method: for chunks, whose vectors have offsets, and for texts, whose vectors are rows.
    assert len(_METHODS) == len(TaskInput.DESCRIPTOR.fields) + 2
    assert {"extract_features", "embed_chunks", "embed", "embed_texts"} <= set(_METHODS)


@pytest.mark.parametrize("method", _METHODS)
async def test_options_are_in_the_signatures_of_both_clients(client: Client, gateway: FakeGateway, method: str) -> None:
    async with AsyncClient(gateway.target) as asynchronous:
        parameters = inspect.signature(getattr(client, method)).parameters
        assert parameters == inspect.signature(getattr(asynchronous, method)).parameters
    assert next(iter(parameters)) == "model"
    # Unpack gives each option of generation its name and type.
    named = [name for name, value in parameters.items() if (name, value.kind) != ("options", value.VAR_KEYWORD)]
    assert named[-1] == "version"
    assert not [name for name in named if parameters[name].kind in (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL)]
    assert getattr(client, method).__doc__


async def test_results_have_their_types_in_both_clients(client: Client, gateway: FakeGateway) -> None:
    gateway.result = task_result(text_classification={"labels": [{"label": "a", "score": 0.5}]})
    labels = assert_type(client.classify("m", "x"), Sequence[LabelScore])
    async with AsyncClient(gateway.target) as asynchronous:
        assert assert_type(await asynchronous.classify("m", "x"), Sequence[LabelScore]) == labels
    assert [(label.label, label.score) for label in labels] == [("a", 0.5)]
    gateway.result = task_result(sentence_embedding={"embedding": [0.5, 1]})
    assert assert_type(client.embed("m", "x"), NDArray[Any]).tolist() == [0.5, 1]
    assert client.embed_texts("m", ["x"]).tolist() == [[0.5, 1]]
    gateway.result = task_result(sentence_embedding={"embedding": [0.5, 1, 2, 3], "vectors": 2})
    assert assert_type(client.embed_texts("m", ["x", "y"]), NDArray[Any]).tolist() == [[0.5, 1], [2, 3]]
    assert list(gateway.requests[-1].input.sentence_embedding.texts) == ["x", "y"]


def test_a_text_of_several_is_not_lost(client: Client, gateway: FakeGateway) -> None:
    for method in (client.generate_text, client.summarize, client.translate):
        with pytest.raises(InvalidInput, match="num_return_sequences: 2 texts, this method returns one; call infer"):
            method("m", "x", num_beams=2, num_return_sequences=2)
    assert gateway.requests == []


def test_a_text_takes_all_options(client: Client, gateway: FakeGateway) -> None:
    gateway.result = task_result(text_generation={"sequences": [{"text": "b", "score": -0.5}]})
    given: GenerationFields = {"num_beams": 2, "bad_words_ids": [[3, 4]], "forced_bos_token_id": 0, "top_logprobs": 1}
    given["length_penalty"] = 2.0
    text = assert_type(client.generate_text("m", "x", **given), GeneratedText)
    assert (text.text, text.score) == ("b", -0.5)
    (request,) = gateway.requests
    words = [TokenSequence(token_ids=[3, 4])]
    options = GenerationOptions(num_beams=2, bad_words_ids=words, forced_bos_token_id=0, top_logprobs=1)
    options.length_penalty = 2.0
    assert request.input.text_generation.options == options
    with pytest.raises(TypeError, match="there is no option 'beams'"):
        client.generate_text("m", "x", beams=2)  # type: ignore[call-arg]


@pytest.mark.parametrize("number", [-1, 2**32])
def test_a_number_that_its_field_cannot_hold_is_named(client: Client, gateway: FakeGateway, number: int) -> None:
    with pytest.raises(InvalidInput, match=rf"^top_k: {number}, must be from 0 to 4,294,967,295$"):
        client.classify("m", "x", top_k=number)
    assert gateway.requests == []


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("localhost", "'localhost' does not end with a port from 1 to 65535: give HOST:PORT, as localhost:50050"),
        ("http://localhost:8080", "'http://localhost:8080' is a URL: give HOST:PORT of gRPC"),
        ("unix:", "the path of the Unix socket is empty"),
    ],
)
def test_a_target_to_which_no_client_can_connect_is_refused_at_once(target: str, said: str) -> None:
    with pytest.raises(SetupError, match=f"^target: {said}"):
        Client(target)


def test_an_option_that_does_not_exist_is_the_callers_mistake(client: Client, gateway: FakeGateway) -> None:
    with pytest.raises(TypeError, match="topk"):
        client.classify("m", "x", topk=2)  # type: ignore[call-arg]
    assert gateway.requests == []


def test_every_option_is_sent(client: Client, gateway: FakeGateway) -> None:
    result = FeatureExtractionResult(shape=[0], type=_FLOAT32)
    gateway.result = TaskResult(feature_extraction=result)
    client.classify("m", "a", "b", top_k=2, truncation=_LEFT, version="3")
    client.embed("m", "a", normalize=False, dimensions=2, truncation=_LEFT)
    answers: dict[str, Any] = {"top_k": 2, "max_answer_tokens": 3, "window_stride_tokens": 4, "allow_no_answer": True}
    client.answer("m", "a", "b", **answers)
    entities: dict[str, Any] = {"ignore_labels": ["O"], "keep_all_labels": True, "window_stride_tokens": 4}
    entities |= {"aggregation": Aggregation.AGGREGATION_MAX, "truncation": _LEFT}
    client.find_entities("m", "a", **entities)
    client.fill_masks("m", "a", top_k=2, targets=("b", "c"), truncation=_LEFT)
    vectors: dict[str, Any] = {"pooling": FeaturePooling.FEATURE_POOLING_CLS, "type": _INT8, "truncation": _LEFT}
    client.extract_features("m", "a", "b", **vectors)
    assert [request.version for request in gateway.requests] == ["3", "", "", "", "", ""]
    assert [request.input for request in gateway.requests] == [
        task_input(text_classification={"text": "a", "text_pair": "b", "top_k": 2, "truncation": _LEFT}),
        task_input(sentence_embedding={"text": "a", "skip_normalize": True, "dimensions": 2, "truncation": _LEFT}),
        task_input(question_answering={"question": "a", "context": "b", **answers}),
        task_input(token_classification={"text": "a", **entities}),
        task_input(fill_mask={"text": "a", "top_k": 2, "targets": ["b", "c"], "truncation": _LEFT}),
        task_input(feature_extraction={"text": "a", "text_pair": "b", **vectors}),
    ]


def test_every_option_of_images_of_tokens_and_of_chunks_is_sent(client: Client, gateway: FakeGateway) -> None:
    vectors: dict[str, Any] = {"shape": [1, 2], "type": _FLOAT32, "data": np.array([0.5, 1], np.float32).tobytes()}
    gateway.result = task_result(multi_vector_embedding={**vectors})
    client.embed_tokens("m", "a", is_query=True, type=_INT8, truncation=_LEFT)
    client.embed_sparse("m", "a", top_k=2, prompt_name="query", truncation=_LEFT)
    client.embed_image("m", b"a", normalize=False, dimensions=2)
    entities: dict[str, Any] = {"threshold": 0.25, "allow_nested": True, "multi_label": True, "truncation": _LEFT}
    client.find_entities_zero_shot("m", "a", ["b", "c"], **entities)
    labels: dict[str, Any] = {"hypothesis_template": "{} d", "truncation": _LEFT}
    client.classify_image_zero_shot("m", b"a", ["b", "c"], **labels)
    client.detokenize("m", [3, 4], skip_special_tokens=True, version="3")
    result = FeatureExtractionResult(chunks=[TextSpan(start=1, end=2)], **vectors)
    gateway.result = TaskResult(feature_extraction=result)
    chunks = {"chunks": [{"start": 1, "end": 2}], "type": _FLOAT32, "truncation": _LEFT}
    (chunk,) = client.embed_chunks("m", "abc", chunk_tokens=2, chunks=[(1, 2)], truncation=_LEFT)
    assert (chunk.start, chunk.end, chunk.embedding.tolist()) == (1, 2, [0.5, 1])
    assert [request.version for request in gateway.requests] == ["", "", "", "", "", "3", ""]
    assert [request.input for request in gateway.requests] == [
        task_input(multi_vector_embedding={"text": "a", "is_query": True, "type": _INT8, "truncation": _LEFT}),
        task_input(sparse_embedding={"text": "a", "top_k": 2, "prompt_name": "query", "truncation": _LEFT}),
        task_input(image_embedding={"image": b"a", "skip_normalize": True, "dimensions": 2}),
        task_input(zero_shot_token_classification={"text": "a", "candidate_labels": ["b", "c"], **entities}),
        task_input(zero_shot_image_classification={"image": b"a", "candidate_labels": ["b", "c"], **labels}),
        task_input(detokenization={"token_ids": [3, 4], "skip_special_tokens": True}),
        task_input(feature_extraction={"text": "abc", "chunk_tokens": 2, **chunks}),
    ]


def test_a_vector_of_bytes_has_signs_where_its_precision_has(client: Client, gateway: FakeGateway) -> None:
    expected = {"BINARY": [-1, 1], "UBINARY": [255, 1], "INT8": [-1, 1], "UINT8": [255, 1]}
    for name, numbers in expected.items():
        precision = EmbeddingPrecision.Value(f"EMBEDDING_PRECISION_{name}")
        gateway.result = task_result(sentence_embedding={"packed": b"\xff\x01", "precision": precision})
        assert client.embed("m", "a", precision=precision).tolist() == numbers


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda client: [*client.generate("m", 7)], "prompt: takes one text, not a value of the type int"),
        (lambda client: [*client.generate("m", messages="a")], "messages: takes a list of messages, each with a role"),
        (
            lambda client: [*client.generate("m", "a", stop_strings="b")],
            "options.stop_strings: takes a list of texts, not one text",
        ),
        (
            lambda client: [*client.generate("m", "a", max_new_tokens="b")],
            "options.max_new_tokens: takes another type of value, or a smaller number",
        ),
        (
            lambda client: client.classify("m", ["a", "b"]),
            "text: takes one text, not a value of the type list; infer_batch runs many inputs",
        ),
        (lambda client: client.embed("m", b"a"), "text: takes one text, not a value of the type bytes"),
        (lambda client: client.answer("m", "a", None), "context: takes one text, not a value of the type NoneType"),
        (lambda client: client.rerank("m", "a", "abc"), "texts: takes a list of texts, not a value of the type str"),
        (lambda client: client.compare("m", "a", 7), "texts: takes a list of texts, not a value of the type int"),
        (
            lambda client: client.classify_zero_shot("m", "a", ["b", 7]),
            "candidate_labels: takes texts, not a value of the type int",
        ),
        (lambda client: client.embed("m", "a\ud800"), "text: is no valid Unicode: it has half a surrogate pair"),
        (lambda client: client.rerank("m", "a", ["b", "\udfff"]), "texts: is no valid Unicode"),
        (lambda client: [*client.generate("m", "\ud800")], "prompt: is no valid Unicode"),
        (
            lambda client: [*client.generate("m", "a", stop_strings=["\ud800"])],
            "options.stop_strings: is no valid Unicode",
        ),
        (
            lambda client: [*client.generate("m", messages=[{"role": "user", "content": "\ud800"}])],
            "messages: is no valid",
        ),
        (lambda client: client.translate("m", "\ud800"), "text: is no valid Unicode"),
        (lambda client: client.embed("\ud800", "a"), "model: is no valid Unicode"),
        (
            lambda client: client.classify_image("m", Path("a")),
            "image: takes the bytes of a file, not a value of the type PosixPath",
        ),
    ],
)
def test_what_is_no_text_gets_a_sentence_and_is_not_sent(
    client: Client, gateway: FakeGateway, call: Callable[[Any], object], problem: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        call(client)
    assert caught.value.message.startswith(problem)
    assert gateway.requests == []


def test_the_errors_that_calls_raise_can_be_imported_with_the_client() -> None:
    assert {type(error).__name__ for error in EVERY_ERROR} | {"NeuronpipeError"} <= set(neuronpipe.client.__all__)


def test_requests_of_a_stream_that_have_no_id_get_their_place_as_one(client: Client) -> None:
    requests = [InferRequest(), InferRequest(request_id="mine"), InferRequest()]
    assert [answer.request_id for answer in client.infer_stream(requests)] == ["0", "mine", "2"]
    # They belong to the caller, who may send them again.
    assert [request.request_id for request in requests] == ["", "mine", ""]
