"""What the protocol says of the server and its models, its streams, and what it has not."""

import asyncio
from typing import Any

import pytest
from google.rpc.code_pb2 import Code

from neuronpipe import __version__
from neuronpipe.api.oip.v2 import open_inference_pb2 as messages
from neuronpipe.api.oip.v2.model_config_pb2 import DataType
from neuronpipe.api.v1.tasks_pb2 import LabelScore, TaskInput, TaskResult, TextClassificationResult
from neuronpipe.core.errors import ModelNotFound, NeuronpipeError, NotConfigured, Unavailable
from neuronpipe.doors.oip.grpc_door import OIP_SERVICE
from neuronpipe.rpc.transport import CallEnd
from tests.unit.doors.oip.written_stages import Context, Server, asks, outputs_of
from tests.unit.every_error import EVERY_ERROR
from tests.unit.model_specs import model_spec


def _answer(input: TaskInput) -> TaskResult | NeuronpipeError:
    text = input.text_classification.text
    if text.isdigit():
        return EVERY_ERROR[int(text)]
    return TaskResult(text_classification=TextClassificationResult(labels=[LabelScore(label=text, score=1)]))


@pytest.fixture
def server() -> Server:
    specs = [model_spec(version=1), model_spec(version=2), model_spec("sentence_embedding", name="vectors")]
    return Server(specs, _answer)


async def test_the_server_says_what_it_is(server: Server) -> None:
    metadata = await server.call("ServerMetadata", messages.ServerMetadataRequest())
    assert (metadata.name, metadata.version) == ("neuronpipe", __version__)
    assert {"statistics", "binary_tensor_data", "model_configuration"} <= set(metadata.extensions)
    assert not any("shared_memory" in extension for extension in metadata.extensions)
    assert (await server.call("ServerLive", messages.ServerLiveRequest())).live


async def test_models_are_ready_while_the_server_is(server: Server) -> None:
    async def ready() -> list[bool]:
        return [
            (await server.call("ServerReady", messages.ServerReadyRequest())).ready,
            (await server.call("ModelReady", messages.ModelReadyRequest(name="small/raw", version="1"))).ready,
        ]

    assert await ready() == [True, True]
    server.is_ready = False
    assert await ready() == [False, False]
    with pytest.raises(ModelNotFound):
        await server.call("ModelReady", messages.ModelReadyRequest(name="large"))


async def test_metadata_has_versions_and_properties(server: Server) -> None:
    metadata = await server.call("ModelMetadata", messages.ModelMetadataRequest(name="small"))
    assert (metadata.name, list(metadata.versions), metadata.platform) == ("small", ["1", "2"], "neuronpipe")
    assert metadata.properties["labels"] == '["a", "b", "c"]'
    assert metadata.properties["max_tokens"] == "16"
    assert metadata.properties["parameters.function"] == "softmax or sigmoid or none"
    vectors = await server.call("ModelMetadata", messages.ModelMetadataRequest(name="vectors"))
    assert vectors.properties["embedding_dimensions"] == "4"


async def test_every_input_of_a_configuration_is_in_the_metadata(server: Server) -> None:  # perf_analyzer needs that
    config = (await server.call("ModelConfig", messages.ModelConfigRequest(name="small"))).config
    metadata = await server.call("ModelMetadata", messages.ModelMetadataRequest(name="small"))
    assert config.max_batch_size == 256
    for described, declared in ((config.input, metadata.inputs), (config.output, metadata.outputs)):
        found = [(tensor.name, list(tensor.dims)) for tensor in described]
        assert found == [(tensor.name, list(tensor.shape[1:])) for tensor in declared]
    assert [tensor.optional for tensor in config.input] == [False, True]
    assert [DataType.Name(tensor.data_type) for tensor in config.output] == ["TYPE_STRING", "TYPE_FP64", "TYPE_UINT32"]
    assert config.HasField("dynamic_batching")
    assert not config.model_transaction_policy.decoupled


async def test_the_index_has_every_name_and_version(server: Server) -> None:
    models = (await server.call("RepositoryIndex", messages.RepositoryIndexRequest())).models
    assert [(model.name, model.version, model.state) for model in models] == [
        ("small", "1", "READY"),
        ("small", "2", "READY"),
        ("small/raw", "1", "READY"),
        ("small/raw", "2", "READY"),
        ("vectors", "1", "READY"),
        ("vectors/raw", "1", "READY"),
    ]


async def test_models_are_loaded_only_where_that_is_on(server: Server) -> None:
    for name in ("RepositoryModelLoad", "RepositoryModelUnload"):
        request = getattr(messages, f"{name}Request")(model_name="small")
        with pytest.raises(NotConfigured, match="use `neuronpipe registry`, or start the gateway with --model-control"):
            await server.call(name, request)


async def test_statistics_are_the_metrics(server: Server) -> None:
    async def statistics(**fields: str) -> Any:
        return (await server.call("ModelStatistics", messages.ModelStatisticsRequest(**fields))).model_stats

    await server.infer(asks("small", text=[["a"], ["b"]]))
    with pytest.raises(NeuronpipeError):
        await server.infer(asks("small", text=[["1"]]))
    (counted,) = await statistics(name="small")
    assert (counted.name, counted.version, counted.inference_count) == ("small", "2", 2)
    times = counted.inference_stats
    assert (times.success.count, times.fail.count) == (2, 1)
    assert (times.queue.count, times.queue.ns) == (2, 22)  # 11 each
    assert (times.compute_infer.count, times.compute_infer.ns) == (2, 44)
    assert times.compute_input.count == times.compute_output.count == 2
    assert 0 < times.compute_input.ns + times.compute_output.ns < times.success.ns
    assert times.cache_hit.count == times.cache_miss.count == 0
    (raw,) = await statistics(name="small/raw")
    assert raw.inference_stats == times  # of the model, by whatever name
    expected = [("small", "1", 0), ("small", "2", 2), ("vectors", "1", 0)]
    assert [
        (statistic.name, statistic.version, statistic.inference_count) for statistic in await statistics()
    ] == expected


async def test_a_stream_goes_on_after_an_error(server: Server) -> None:
    requests = [asks("small", text=[[text]]) for text in ("a", "0", "b")]
    for number, request in enumerate(requests):
        request.id = f"r{number}"
    requests[2].model_name = "large"
    answers = {answer.infer_response.id: answer for answer in await server.stream(requests)}
    assert outputs_of(answers["r0"].infer_response)["label"] == [["a"]]
    assert answers["r0"].error_message == ""
    assert answers["r1"].error_message == EVERY_ERROR[0].message
    assert answers["r2"].error_message.startswith("model 'large' is not served")
    assert answers["r2"].infer_response.model_name == "large"
    assert all(answer.infer_response.parameters["triton_final_response"].bool_param for answer in answers.values())


async def test_answers_of_a_stream_come_when_they_are_ready(server: Server) -> None:
    is_second_there = asyncio.Event()
    infer = server.service.infer

    async def wait(request: Any, call: Any, spans: Any) -> Any:
        if request.request_id == "first":
            await is_second_there.wait()
        else:
            is_second_there.set()
        return await infer(request, call, spans)

    server.service.infer = wait  # type: ignore[method-assign]
    requests = [asks("small", text=[["a"]]), asks("small", text=[["b"]])]
    requests[0].id, requests[1].id = "first", "second"
    async with asyncio.timeout(10):
        assert len(await server.stream(requests)) == 2


async def test_a_stream_ends_with_what_ends_its_requests(server: Server) -> None:
    async def messages_() -> Any:
        yield asks("small", text=[["a"]])
        raise Unavailable("the gateway is stopping")

    answers = server.handlers["/inference.GRPCInferenceService/ModelStreamInfer"](messages_(), Context())
    assert (await anext(answers)).error_message == ""
    with pytest.raises(Unavailable):
        await anext(answers)


@pytest.mark.parametrize("error", EVERY_ERROR, ids=lambda error: type(error).__name__)
async def test_every_error_of_the_pipeline_is_raised_as_it_is(server: Server, error: NeuronpipeError) -> None:
    with pytest.raises(type(error)) as raised:
        await server.infer(asks("small", text=[["a"], [str(EVERY_ERROR.index(error))]]))
    assert raised.value.message == error.message


async def test_what_is_not_there_says_why(server: Server) -> None:
    for name in ("CudaSharedMemoryRegister", "TraceSetting"):
        with pytest.raises(CallEnd) as error:
            await server.call(name, b"\x0a\x01x")
        assert error.value.code == Code.UNIMPLEMENTED
        assert len(error.value.message) > 15


def test_every_rpc_has_a_handler_and_the_reverse(server: Server) -> None:
    rpcs = [rpc for rpc, _ in server.rpcs]
    assert {method.name for method in OIP_SERVICE.methods} < {rpc.path.rpartition("/")[2] for rpc in rpcs}
    assert len(rpcs) == 20
    assert {rpc.service for rpc in rpcs} == {OIP_SERVICE.full_name}
    assert {rpc.path.rpartition("/")[2] for rpc in rpcs if rpc.is_work} == {"ModelInfer", "ModelStreamInfer"}
