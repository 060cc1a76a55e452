"""MODEL/raw: token ids or pixels in, the model's outputs out, which here are the ids or their sum."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from neuronpipe.core.errors import InternalError, InvalidInput, Overloaded
from neuronpipe.core.metrics import Meters
from neuronpipe.core.names import Metrics
from neuronpipe.doors.oip.service import TensorService
from neuronpipe.gateway.settings import PipelineSettings
from tests.unit.doors.oip.written_stages import Server, asks, outputs_of
from tests.unit.model_specs import image_spec, model_spec

_IDS = np.array([[5, 6, 7], [8, 9, 0]])
_MASK = np.array([[1, 1, 1], [1, 1, 0]])


@pytest.fixture
def server() -> Server:
    return Server([model_spec("question_answering")])


def _sequences(server: Server) -> list[dict[str, list[int]]]:
    return [{name: array.tolist() for name, array in item.sequences.arrays[0].items()} for item in server.executed]


@pytest.mark.parametrize("kind", [np.int64, np.int32])
async def test_rows_are_requests_of_their_own_without_their_padding(server: Server, kind: Any) -> None:
    response = await server.infer(asks("small/raw", input_ids=_IDS.astype(kind), attention_mask=_MASK.astype(kind)))
    assert _sequences(server) == [{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}]
    assert all(item.sequences.arrays[0]["input_ids"].dtype == np.int32 for item in server.executed)
    assert not server.tokenized
    assert not server.inputs  # nothing was decoded
    rows = [[5, 6, 7], [8, 9, 0]]  # as wide as the input, zero where it was padded
    assert outputs_of(response) == {"start_logits": rows, "end_logits": rows}


async def test_without_a_mask_every_token_counts(server: Server) -> None:
    await server.infer(asks("small/raw", input_ids=_IDS))
    assert _sequences(server) == [{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9, 0]}]


async def test_a_batch_that_is_all_padded_is_as_wide_as_it_came(server: Server) -> None:
    response = await server.infer(asks("small/raw", input_ids=_IDS, attention_mask=np.array([[1, 0, 0], [1, 0, 0]])))
    assert outputs_of(response)["start_logits"] == [[5, 0, 0], [8, 0, 0]]


async def test_token_types_go_along_unless_they_are_all_zero(server: Server) -> None:
    types = np.array([[0, 1, 1], [0, 0, 0]])
    await server.infer(asks("small/raw", input_ids=_IDS, attention_mask=_MASK, token_type_ids=types))
    await server.infer(asks("small/raw", input_ids=_IDS[:1], token_type_ids=np.zeros((1, 3), np.int64)))
    assert _sequences(server) == [
        {"input_ids": [5, 6, 7], "token_type_ids": [0, 1, 1]},
        {"input_ids": [8, 9], "token_type_ids": [0, 0]},
        {"input_ids": [5, 6, 7]},
    ]


async def test_outputs_of_a_fixed_size_have_it() -> None:
    server = Server([model_spec("text_classification")])
    response = await server.infer(asks("small/raw", input_ids=_IDS, attention_mask=_MASK))
    assert outputs_of(response) == {"logits": [[18, 18, 18], [17, 17, 17]]}


async def test_outputs_of_tokens_may_have_more_axes() -> None:
    server = Server([model_spec("token_classification")])
    response = await server.infer(asks("small/raw", input_ids=_IDS, attention_mask=_MASK))
    assert outputs_of(response)["logits"] == [[[5] * 5, [6] * 5, [7] * 5], [[8] * 5, [9] * 5, [0] * 5]]


async def test_images_are_pixels() -> None:
    server = Server([image_spec()])
    pixels = np.zeros((2, 3, 32, 48), np.uint8)
    pixels[1, 0, 0, 0] = 7
    response = await server.infer(asks("small/raw", pixels=pixels))
    assert outputs_of(response) == {"logits": [[0, 0, 0], [7, 7, 7]]}
    assert [item.work.cost_tokens for item in server.executed] == [6, 6]


async def test_metadata_is_what_the_model_takes(server: Server) -> None:
    described = server.service.model_metadata("small/raw", "1")
    found = [(input["name"], input["datatype"], input["shape"]) for input in described["inputs"]]
    assert found == [(name, "INT64", [-1, -1]) for name in ("input_ids", "attention_mask", "token_type_ids")]
    assert [(output["name"], output["datatype"], output["shape"]) for output in described["outputs"]] == [
        (name, "FP32", [-1, -1]) for name in ("start_logits", "end_logits")
    ]
    optional = [tensor["optional"] for tensor in server.service.model_config("small/raw", "")["input"]]
    assert optional == [False, True, True]


async def test_a_raw_request_has_its_place_and_its_metrics_as_every_other(server: Server) -> None:
    await server.infer(asks("small/raw", input_ids=_IDS))
    tokens = server.telemetry.meters.counter(Metrics.REQUEST_TOKENS, "small", "1")
    assert tokens.value == 6
    assert [item.work.cost_tokens for item in server.executed] == [3, 3]
    limited = Server([model_spec("question_answering")], max_tokens_in_flight=4)
    with pytest.raises(Overloaded):
        await limited.infer(asks("small/raw", input_ids=_IDS))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "input_ids: is missing"),
        ({"input_ids": _IDS[0]}, "input_ids: its shape must be [rows, -1]"),
        ({"input_ids": _IDS.astype(np.uint8)}, "input_ids: its datatype must be INT64 or INT32"),
        ({"input_ids": -_IDS}, "input_ids: values from -9 to 0, must be from 0 to 2147483647"),
        (
            {"input_ids": _IDS + (1 << 33)},
            "input_ids: values from 8589934592 to 8589934601, must be from 0 to 2147483647",
        ),
        ({"input_ids": _IDS, "token_type_ids": _IDS}, "token_type_ids: values from 0 to 9, must be from 0 to 1"),
        ({"input_ids": _IDS, "attention_mask": _MASK[:1]}, "inputs: input_ids has 2 rows, attention_mask has 1 rows"),
        ({"input_ids": _IDS, "attention_mask": _MASK[:, :2]}, "attention_mask: 2 tokens in a row, input_ids has 3"),
        (
            {"input_ids": _IDS, "attention_mask": _MASK[:, ::-1]},
            "attention_mask[1]: must be ones and then zeros: padding is on the right",
        ),
        (
            {"input_ids": _IDS[:1], "attention_mask": np.array([[1, 0, 1]])},
            "attention_mask: must be ones and then zeros: padding is on the right",
        ),
        (
            {"input_ids": _IDS[:1], "attention_mask": np.array([[2, 1, 0]])},
            "attention_mask: must be ones and then zeros: padding is on the right",
        ),
        ({"pixels": _IDS}, "inputs: there is no input 'pixels', only input_ids, attention_mask, token_type_ids"),
    ],
    ids=str,
)
async def test_arrays_that_do_not_fit_are_named(server: Server, inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput) as error:
        await server.infer(asks("small/raw", **inputs))
    assert error.value.message == message
    assert not server.executed


async def test_padding_has_a_limit(server: Server) -> None:
    width = (1 << 16) + 1
    with pytest.raises(InvalidInput, match="input_ids: 65537 elements in a row, the limit is 65536"):
        await server.infer(asks("small/raw", input_ids=np.zeros((1, width), np.int64)))
    assert not server.executed


async def test_outputs_that_padding_makes_too_large_are_not_made() -> None:
    server = Server([model_spec("token_classification")], max_batch_response_bytes=1 << 20)
    mask = np.zeros((1, 1 << 16), np.int64)
    mask[0, 0] = 1
    with pytest.raises(InvalidInput) as error:  # 65536 tokens x 5 labels x 4 bytes
        await server.infer(asks("small/raw", input_ids=mask, attention_mask=mask))
    assert error.value.message.startswith(
        "logits: about 1310720 bytes in the shape [1, 65536, 5], the limit is 1048576"
    )


async def test_bytes_must_fill_the_shape(server: Server) -> None:
    request = asks("small/raw", input_ids=_IDS)
    request.raw_input_contents[0] += b"\0"
    with pytest.raises(InvalidInput, match="input_ids: 49 bytes, its shape takes 48"):
        await server.infer(request)


async def test_typed_contents_are_read_as_raw_ones(server: Server) -> None:
    request = asks("small/raw", input_ids=_IDS)
    del request.raw_input_contents[:]
    request.inputs[0].contents.int64_contents.extend(_IDS.ravel().tolist())
    await server.infer(request)
    assert _sequences(server) == [{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9, 0]}]


@pytest.mark.parametrize("shape", [(2, 33, 48), (3, 32, 48, 1)])
async def test_an_image_of_another_size_is_an_error(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidInput, match=r"pixels: its shape must be \[rows, 3, 32, 48\]"):
        await Server([image_spec()]).infer(asks("small/raw", pixels=np.zeros((1, *shape), np.uint8)))


async def test_raw_models_have_no_parameters(server: Server) -> None:
    with pytest.raises(InvalidInput, match="there is no parameter 'top_k', only priority, timeout, cache_control"):
        await server.infer(asks("small/raw", {"top_k": 1}, input_ids=_IDS))


class _Results:
    """A cache of results that must not be asked."""

    async def get(self, *asked: Any) -> None:
        raise AssertionError("was asked")


async def test_raw_results_are_not_cached_as_they_have_no_input_to_be_found_by(server: Server) -> None:
    for served in server.gateway.catalog.served:
        served.resource = replace(served.resource, digest="cached")
    server.gateway.pipeline._results = _Results()  # type: ignore[assignment]
    await server.infer(asks("small/raw", input_ids=_IDS))
    with pytest.raises(InternalError):
        await server.infer(asks("small", question=[["a"]], context=[["a"]]))
    config = TensorService(server.gateway, PipelineSettings(), Meters(), lambda: True).model_config
    assert [config(name, "")["response_cache"]["enable"] for name in ("small", "small/raw")] == [True, False]
