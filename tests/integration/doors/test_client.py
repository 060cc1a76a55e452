"""The Python client: typed methods, retries, and the synchronous front."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio

from neuronpipe.api.v1.inference_pb2 import InferResponse
from neuronpipe.api.v1.tasks_pb2 import ScoreFunction
from neuronpipe.client import AsyncClient, Client
from neuronpipe.core.errors import InvalidInput, NeuronpipeError, Overloaded, Unavailable
from neuronpipe.core.status import CODES, to_status
from tests.callers.requests import classify

CODE = {code.value[0]: code for code in grpc.StatusCode}


class FailingGateway:
    """Answers the first calls with errors and the rest well. `arrivals_s` are the times at which calls came."""

    def __init__(self) -> None:
        self.errors: list[NeuronpipeError] = []
        self.arrivals_s: list[float] = []
        self.target = ""

    async def infer(self, request: bytes, context: "grpc.aio.ServicerContext[bytes, bytes]") -> bytes:
        self.arrivals_s.append(time.monotonic())
        if self.errors:
            error = self.errors.pop(0)
            trailer: list[tuple[str, str | bytes]] = [("grpc-status-details-bin", to_status(error).SerializeToString())]
            if isinstance(error, Overloaded):
                trailer.append(("grpc-retry-pushback-ms", str(int(error.retry_after_s * 1000))))
            await context.abort(CODE[CODES[type(error)]], error.message, tuple(trailer))
        return InferResponse(model="m").SerializeToString()


@pytest_asyncio.fixture
async def failing_gateway() -> AsyncIterator[FailingGateway]:
    gateway = FailingGateway()
    server = grpc.aio.server()
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(gateway.infer)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("neuronpipe.api.v1.InferenceService", {"Infer": handler}),)
    )
    gateway.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield gateway
    await server.stop(0)


@pytest.mark.local_only
async def test_overloaded_call_is_retried_when_the_pushback_is_over(failing_gateway: FailingGateway) -> None:
    failing_gateway.errors = [Overloaded("full", retry_after_s=0.4)]
    async with AsyncClient(failing_gateway.target) as client:
        response = await client.infer(classify("a"))

    assert response.model == "m"
    first_s, second_s = failing_gateway.arrivals_s
    # Without pushback the first retry comes after at most 0.12 s (0.1 s and a fifth of jitter).
    assert second_s - first_s >= 0.39


@pytest.mark.local_only
async def test_unavailable_call_is_retried(failing_gateway: FailingGateway) -> None:
    failing_gateway.errors = [Unavailable("starting"), Unavailable("starting")]
    async with AsyncClient(failing_gateway.target) as client:
        assert (await client.infer(classify("a"))).model == "m"

    assert len(failing_gateway.arrivals_s) == 3


@pytest.mark.local_only
async def test_retries_end(failing_gateway: FailingGateway) -> None:
    failing_gateway.errors = [Unavailable("starting")] * 9
    async with AsyncClient(failing_gateway.target) as client:
        with pytest.raises(Unavailable, match="starting"):
            await client.infer(classify("a"))

    assert len(failing_gateway.arrivals_s) == 4


@pytest.mark.local_only
async def test_callers_fault_is_not_retried(failing_gateway: FailingGateway) -> None:
    failing_gateway.errors = [InvalidInput("text", "is empty")]
    async with AsyncClient(failing_gateway.target) as client:
        with pytest.raises(InvalidInput) as caught:
            await client.infer(classify("a"))

    assert (caught.value.field, caught.value.problem) == ("text", "is empty")
    assert len(failing_gateway.arrivals_s) == 1


@pytest.mark.local_only
async def test_nothing_is_retried_when_retries_are_off(failing_gateway: FailingGateway) -> None:
    failing_gateway.errors = [Overloaded("full", retry_after_s=2.5)]
    async with AsyncClient(failing_gateway.target, retries=False) as client:
        with pytest.raises(Overloaded, match="full") as caught:
            await client.infer(classify("a"))

    assert caught.value.retry_after_s == 2.5


async def test_typed_methods_give_what_infer_gives(gateway_target: str) -> None:
    async with AsyncClient(gateway_target) as client:
        labels = await client.classify(
            "classifier", "The cat sat.", top_k=4, function=ScoreFunction.SCORE_FUNCTION_SIGMOID
        )
        vector = await client.embed("minilm", "The cat sat.", dimensions=16)
        answers = await client.answer("answerer", "Who sat?", "The cat sat on the mat.", top_k=2)
        alike = await client.compare(
            "minilm", "The cat sat.", ["The cat sat.", "A cat is sitting.", "Stocks fell sharply."]
        )
        entities = await client.find_entities("tagger", "The cat sat.", keep_all_labels=True)
        mask_token = (await client.get_model("filler")).mask_token
        masks = await client.fill_masks("filler", f"The {mask_token} sat.", targets=["cat", "dog"])
        response = await client.infer(classify("The cat sat.", top_k=4, function=ScoreFunction.SCORE_FUNCTION_SIGMOID))

    assert alike[0] == pytest.approx(1, abs=1e-6)
    assert 1 > alike[1] > 0.5 > alike[2]
    assert list(labels) == list(response.result.text_classification.labels)
    assert vector.dtype == np.float32
    assert vector.shape == (16,)
    assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-6)
    assert [answer.text in "The cat sat on the mat." for answer in answers] == [True, True]
    assert (entities[0].start, entities[-1].end) == (0, len("The cat sat."))
    assert {token.token for token in masks[0].tokens} == {"cat", "dog"}


async def test_synchronous_client_gives_what_the_asynchronous_one_gives(gateway_target: str) -> None:
    def everything() -> tuple[Any, ...]:
        with Client(gateway_target) as client:
            requests = [classify("a", request_id="1"), classify("b", request_id="2")]
            return (
                client.classify("classifier", "The cat sat.", top_k=4),
                client.embed("minilm", "The cat sat.").tolist(),
                client.answer("answerer", "Who sat?", "The cat sat on the mat."),
                client.find_entities("tagger", "The cat sat."),
                client.fill_masks("filler", "The [MASK] sat."),
                [outcome.response.result for outcome in client.infer_batch(requests)],
                {answer.request_id for answer in client.infer_stream(requests)},
                [model.name for model in client.list_models()],
                client.get_model("minilm").max_tokens,
            )

    labels, vector, answers, entities, masks, results, stream_ids, names, max_tokens = await asyncio.to_thread(
        everything
    )

    async with AsyncClient(gateway_target) as client:
        assert labels == await client.classify("classifier", "The cat sat.", top_k=4)
        assert vector == (await client.embed("minilm", "The cat sat.")).tolist()
        assert answers == await client.answer("answerer", "Who sat?", "The cat sat on the mat.")
        assert entities == await client.find_entities("tagger", "The cat sat.")
        assert masks == await client.fill_masks("filler", "The [MASK] sat.")
        # The shape of the batch that a text happens to be in changes the last bits of its scores.
        for result, text in zip(results, "ab", strict=True):
            alone = (await client.infer(classify(text))).result.text_classification.labels
            scores = {label.label: pytest.approx(label.score, abs=1e-6) for label in alone}
            assert {label.label: label.score for label in result.text_classification.labels} == scores
    assert (stream_ids, max_tokens) == ({"1", "2"}, 256)
    assert {"classifier", "minilm", "answerer"} <= set(names)
