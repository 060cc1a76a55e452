"""The system that is fuzzed: four processes with every door, what leads somewhere in them, and what must hold of them
afterwards.
"""

import asyncio
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
from google.protobuf.descriptor import FileDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.rpc import code_pb2
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from demo.processes import ServiceProcess, four_processes
from neuronpipe.api.oip.v2 import open_inference_pb2
from neuronpipe.api.tei.v1 import tei_pb2
from neuronpipe.api.v1 import inference_pb2, models_pb2, stages_pb2, tensors_pb2, traces_pb2
from neuronpipe.cli.request import sample_json
from neuronpipe.cli.task_json import read_task_input
from tests.callers.metrics import series_of
from tests.fuzz.messages import Agree
from tests.suite.waiting import until

# Task → a model that has it.
MODELS = {
    "text_classification": "classifier",
    "sentence_embedding": "minilm",
    "question_answering": "answerer",
    "token_classification": "tagger",
    "fill_mask": "filler",
    "feature_extraction": "extractor",
    "sentence_similarity": "minilm",
    "rerank": "reranker",
    "zero_shot_classification": "entailer",
    "image_classification": "viewer",
    "tokenization": "minilm",
    "detokenization": "minilm",
}
_NAMES = sorted(set(MODELS.values()))
WORDS: Mapping[str, Sequence[str]] = {
    "model": _NAMES,
    "model_name": [*_NAMES, *(f"{name}.raw" for name in _NAMES)],
    "neuronpipe-model": _NAMES,
    "version": ["", "1", "2"],
    "model_version": ["", "1", "2"],
    "service": ["", "neuronpipe.api.v1.InferenceService"],
    "datatype": ["BYTES", "INT64", "INT32", "UINT8", "FP32"],
    "task": [task.replace("_", "-") for task in MODELS],
}
# The public API and the stages' services; those of gRPC come with them.
_API: Sequence[FileDescriptor] = [
    *(module.DESCRIPTOR for module in (inference_pb2, models_pb2, traces_pb2)),
    *(module.DESCRIPTOR for module in (open_inference_pb2, tei_pb2, health_pb2, reflection_pb2)),
]
_STAGES = {
    "TokenizerService": "tokenizer",
    "NeuronExecutorService": "neuron-executor",
    "PostprocessorService": "postprocessor",
}
# They never end by themselves.
_LEFT_OUT = {"grpc.health.v1.Health.Watch"}
# Caches are small, so that they are full when the memory is first looked at.
_OPTIONS = ("--kept-traces", "10", "--metrics-listen", "127.0.0.1:0")
_GATEWAY_ALONE = ("--http-listen", "127.0.0.1:0", "--default-models", "minilm,classifier", "--result-cache-models", "*")
_SMALL_CACHE = str(1 << 20)
_GAUGES = (
    "neuronpipe_request_in_flight",
    "neuronpipe_request_tokens_in_flight",
    "neuronpipe_item_in_flight",
    "neuronpipe_queue_sequences",
    "neuronpipe_queue_tokens",
)
_SEED_LIMIT_S = 60
FAULTS = (code_pb2.INTERNAL, code_pb2.UNKNOWN)


@dataclass(frozen=True)
class Target:
    """A method, and the service that has it."""

    service: str
    method: MethodDescriptor

    @property
    def path(self) -> str:
        return f"/{self.door}/{self.method.name}"

    @property
    def door(self) -> str:
        return self.method.containing_service.full_name


def targets() -> list[Target]:
    """Every method that a process has, but for those that never end."""
    methods = [method for file in _API for service in file.services_by_name.values() for method in service.methods]
    stages = [
        Target(stage, stages_pb2.DESCRIPTOR.services_by_name[service].methods[0]) for service, stage in _STAGES.items()
    ]
    return [Target("gateway", method) for method in methods if method.full_name not in _LEFT_OUT] + stages


@dataclass
class FuzzedSystem:
    """`seeds`: right messages, by their full names, which were answered when they were made."""

    processes: Mapping[str, ServiceProcess]
    http_address: str
    seeds: dict[str, list[Message]] = field(default_factory=dict)

    def address(self, service: str) -> str:
        return self.processes[service].target

    def rss_mib(self) -> dict[str, int]:
        """The memory of each process."""
        return {name: psutil.Process(process.pid).memory_info().rss >> 20 for name, process in self.processes.items()}

    def faults(self) -> list[dict[str, object]]:
        """What the logs have of errors: each is a bug, as all messages were callers'."""
        return [
            line
            for process in self.processes.values()
            for line in process.events()
            if line["level"] in ("error", "critical")
        ]

    def work(self) -> dict[str, float]:
        """The gauges of work that are not zero, by service and name."""
        left = {}
        for name, process in self.processes.items():
            for series, value in series_of(process).items():
                if series.startswith(_GAUGES) and value:
                    left[f"{name}: {series}"] = value
        return left

    def check_at_rest(self) -> None:
        """Fails where a process has ended, or a log has an error, or work is left."""
        faults = self.faults()
        assert not faults, faults[:3]
        assert all(psutil.pid_exists(process.pid) for process in self.processes.values())
        until(lambda: not self.work())


@contextmanager
def running_system(repository: Path) -> Iterator[FuzzedSystem]:
    """Four processes over a repository that has a fake model of every task."""
    stage_options = {"tokenizer": ("--token-cache-bytes", _SMALL_CACHE)}
    with four_processes(
        repository,
        *_OPTIONS,
        stage_options=stage_options,
        gateway_options=(*_GATEWAY_ALONE, "--result-cache-bytes", _SMALL_CACHE),
    ) as processes:
        system = FuzzedSystem(processes, str(processes["gateway"].wait_for("listening for HTTP")["address"]))
        asyncio.run(_add_seeds(system))
        yield system


async def _add_seeds(system: FuzzedSystem) -> None:
    """Right messages: of the API from the examples of all tasks, of the stages what these lead to."""
    channels = {name: grpc.aio.insecure_channel(system.address(name)) for name in system.processes}
    seeds = system.seeds
    try:
        for task, model in MODELS.items():
            input = read_task_input(sample_json(task))
            request = inference_pb2.InferRequest(model=model, request_id="seed", input=input)
            await _call(channels["gateway"], "/neuronpipe.api.v1.InferenceService/Infer", request)
            _add(seeds, request, inference_pb2.InferStreamRequest(request=request))
            head: Any = {
                "context": stages_pb2.ItemContext(item_id=1, request_id="seed"),
                "model": model,
                "version": "1",
            }
            tokenize = stages_pb2.TokenizeRequest(items=[stages_pb2.TokenizeItem(**head, input=input)])
            encoded = (await _stage(channels, "tokenizer", tokenize, stages_pb2.TokenizeResponse)).encoded
            outputs: Sequence[tensors_pb2.TensorSet] = ()
            if encoded.sequences:
                execute = stages_pb2.ExecuteRequest(items=[stages_pb2.ExecuteItem(**head, sequences=encoded.sequences)])
                outputs = (
                    await _stage(channels, "neuron-executor", execute, stages_pb2.ExecuteResponse)
                ).prediction.outputs
                _add(seeds, execute)
            postprocess = stages_pb2.PostprocessRequest(
                items=[
                    stages_pb2.PostprocessItem(**head, input=input, annotations=encoded.annotations, outputs=outputs)
                ]
            )
            _add(seeds, tokenize, postprocess)
        requests: Any = seeds["neuronpipe.api.v1.InferRequest"]
        _add(seeds, *(inference_pb2.InferBatchRequest(requests=[request, *requests[:3]]) for request in requests))
        await _add_tensor_requests(channels["gateway"], seeds)
    finally:
        for channel in channels.values():
            await channel.close()


async def _add_tensor_requests(channel: grpc.aio.Channel, seeds: dict[str, list[Message]]) -> None:
    """Requests of the Open Inference Protocol, as the models' metadata describe them."""
    service = "/inference.GRPCInferenceService"
    listed = open_inference_pb2.RepositoryIndexResponse.FromString(
        await _call(channel, f"{service}/RepositoryIndex", open_inference_pb2.RepositoryIndexRequest())
    )
    for name in {model.name for model in listed.models}:
        metadata = open_inference_pb2.ModelMetadataResponse.FromString(
            await _call(channel, f"{service}/ModelMetadata", open_inference_pb2.ModelMetadataRequest(name=name))
        )
        for is_raw in (False, True):
            request = open_inference_pb2.ModelInferRequest(model_name=name, id="seed")
            for input in metadata.inputs:
                shape = [2 if size < 0 else size for size in input.shape]
                tensor = request.inputs.add(name=input.name, datatype=input.datatype, shape=shape)
                count = int(np.prod(shape))
                if input.datatype == "BYTES":
                    texts = [b"A fine [MASK] day."] * count
                    if is_raw:
                        raw = b"".join(len(text).to_bytes(4, "little") + text for text in texts)
                        request.raw_input_contents.append(raw)
                    else:
                        tensor.contents.bytes_contents.extend(texts)
                elif is_raw:
                    request.raw_input_contents.append(
                        bytes({"INT64": 8, "INT32": 4, "UINT8": 1}[input.datatype] * count)
                    )
                else:
                    kind = {"INT64": "int64", "INT32": "int", "UINT8": "uint"}[input.datatype]
                    getattr(tensor.contents, f"{kind}_contents").extend([1] * count)
            _add(seeds, request)


async def _call(channel: grpc.aio.Channel, path: str, request: Message) -> bytes:
    method: Any = channel.unary_unary(path)
    answer: bytes = await method(request.SerializeToString(), timeout=_SEED_LIMIT_S)
    return answer


async def _stage(channels: Mapping[str, grpc.aio.Channel], service: str, request: Message, response: Any) -> Any:
    """The outcome of the one item of a request."""
    (target,) = (target for target in targets() if target.service == service)
    method: Any = channels[service].stream_stream(target.path)
    call = method(iter([request.SerializeToString()]), timeout=_SEED_LIMIT_S)
    outcomes = [outcome async for data in call for outcome in response.FromString(data).outcomes]
    assert len(outcomes) == 1
    assert not outcomes[0].HasField("error"), outcomes[0]
    return outcomes[0]


def _add(seeds: dict[str, list[Message]], *messages: Message) -> None:
    for message in messages:
        seeds.setdefault(message.DESCRIPTOR.full_name, []).append(message)


def _agree_on_model(message: Any, chance: random.Random) -> None:
    task = message.input.WhichOneof("task")
    if task in MODELS:
        message.model = MODELS[task]
        message.version = chance.choice(("", "1") if message.DESCRIPTOR.name == "InferRequest" else ("1",))


def _agree_on_size(message: Any, chance: random.Random) -> None:
    kinds = {1: 4, 2: 4, 3: 8, 4: 1}
    message.data_type = chance.choice(list(kinds))
    message.name = chance.choice(["input_ids", "attention_mask", "token_type_ids", "pixel_values", "logits", "x"])
    message.shape[:] = [chance.randrange(1, 9) for _ in range(chance.randrange(1, 4))]
    message.data = chance.randbytes(int(np.prod(message.shape)) * kinds[message.data_type])


AGREE: Mapping[str, Agree] = {
    "neuronpipe.api.v1.InferRequest": _agree_on_model,
    "neuronpipe.api.v1.TokenizeItem": _agree_on_model,
    "neuronpipe.api.v1.PostprocessItem": _agree_on_model,
    "neuronpipe.api.v1.Tensor": _agree_on_size,
}


def statuses_in(message: Any) -> Iterator[Status]:
    """Every google.rpc.Status within a message."""
    if isinstance(message, Status):
        yield message
        return
    for descriptor, value in message.ListFields():
        if descriptor.type == descriptor.TYPE_MESSAGE and not descriptor.message_type.GetOptions().map_entry:
            for inner in value if descriptor.is_repeated else [value]:
                yield from statuses_in(inner)
