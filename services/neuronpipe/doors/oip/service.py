"""The part of the protocol that gRPC and HTTP share. Answers are the messages of oip/v2 as JSON, tensors apart.

ModelControl loads and unloads models by the registry.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from neuronpipe import __version__
from neuronpipe.api.v1.inference_pb2 import GenerateStart, StageTimings, Usage
from neuronpipe.api.v1.models_pb2 import Model, VersionState
from neuronpipe.api.v1.tasks_pb2 import GeneratedText, TaskResult
from neuronpipe.bundles.registry import Registry, Signed
from neuronpipe.bundles.served import ServedModel
from neuronpipe.bundles.sources import Repository
from neuronpipe.core.callers import current_caller
from neuronpipe.core.calls import Call
from neuronpipe.core.errors import ChangeRefused, DeadlineExceeded, InvalidInput, ModelNotFound, NotConfigured
from neuronpipe.core.items import ModelKey
from neuronpipe.core.metrics import Meters
from neuronpipe.core.model import ModelTable
from neuronpipe.core.names import Name, Spans
from neuronpipe.core.packed import pack_result
from neuronpipe.core.tracing import new_request_id
from neuronpipe.doors.oip.models import PLATFORM, NamedModel, named_models, statistics_of
from neuronpipe.doors.oip.options import Options, read_options
from neuronpipe.doors.oip.task_model import STREAM
from neuronpipe.doors.oip.tensors import BYTES, GivenTensor, Parameter, RowInput, Tensor
from neuronpipe.gateway.access import check_may_change, registry_of
from neuronpipe.gateway.assembly import Gateway
from neuronpipe.gateway.inference import (
    GeneratedPart,
    InferenceRequest,
    InferenceResult,
)
from neuronpipe.gateway.many import infer_together
from neuronpipe.gateway.routing import GatewayModel, VersionRouter
from neuronpipe.gateway.settings import PipelineSettings
from neuronpipe.gateway.tenants.tenants import Tenants
from neuronpipe.platform.process.in_flight import LARGE_BYTES


class ModelControl:
    """Changes one registry. `tenants`: None where every caller may change it.

    Every method raises NotAllowed, ModelNotFound, ChangeRefused and DeadlineExceeded.
    """

    def __init__(self, repository: Repository, tenants: Tenants | None, router: VersionRouter) -> None:
        self._repository = repository
        self._tenants = tenants
        self._router = router

    async def load(self, name: str, limit_s: float | None) -> None:
        """Has a model served, and returns when every version that its names and shares need is ready here."""
        registry = await self._change(name, is_unloaded=False)
        keys = [ModelKey(name, version) for version in sorted(registry.models[name].declared.versions)]
        loading = {VersionState.VERSION_STATE_LOADING, VersionState.VERSION_STATE_DRAINING}

        def is_settled() -> bool:
            return not any(self._router.describe(key).state in loading for key in keys)

        await self._wait(registry.revision, is_settled, limit_s)
        for model in map(self._router.describe, keys):
            if model.state == VersionState.VERSION_STATE_FAILED:
                raise ChangeRefused(f"model {name!r} version {model.version} cannot be loaded: {model.problem}")

    async def unload(self, name: str, limit_s: float | None) -> None:
        """Has no version of a model served, and returns when new requests do not get it any more."""
        registry = await self._change(name, is_unloaded=True)
        await self._wait(registry.revision, lambda: name not in self._router.served, limit_s)

    async def _change(self, name: str, *, is_unloaded: bool) -> Registry:
        caller = current_caller()
        check_may_change(self._tenants, caller, name)
        signed = Signed(caller.tenant or "anonymous")

        def change() -> Registry:
            present = self._repository.read_registry()
            if name in present.models and present.models[name].is_unloaded == is_unloaded:
                return present
            operation = Registry.unload if is_unloaded else Registry.load
            return self._repository.change_registry(lambda registry: operation(registry, name, signed), signed)

        return await registry_of(change)

    async def _wait(self, revision: int, is_done: Callable[[], bool], limit_s: float | None) -> None:
        """Waits until this gateway follows a revision, and something is done."""
        changed = asyncio.Event()
        unwatch = self._router.watch(changed.set)
        try:
            async with asyncio.timeout(limit_s):
                while self._router.revision < revision or not is_done():
                    changed.clear()
                    await changed.wait()
        except TimeoutError:
            raise DeadlineExceeded("the registry has the change; the gateway has not followed it in time") from None
        finally:
            unwatch()


# The protocol's names of what is here.
EXTENSIONS = ("binary_tensor_data", "model_configuration", "parameters", "schedule_policy", "statistics")

# The extension of loading and unloading, where it is on.
_CONTROL = "model_repository"
_FIXED_MODELS = (
    "models are loaded as the registry of the repository says: use `neuronpipe registry`, or start the gateway with "
    "--model-control"
)
# Why Triton's other methods are not here.
NO_SHARED_MEMORY = "there is no shared memory: send tensors in the request"
SETTINGS_OF_TRACES = "traces are set up by the server's options"
SETTINGS_OF_LOGS = "logs are set up by the server's options"

# The others are READY: a model that is loaded on demand takes requests.
_STATES = {
    VersionState.VERSION_STATE_LOADING: "LOADING",
    VersionState.VERSION_STATE_DRAINING: "UNLOADING",
    VersionState.VERSION_STATE_FAILED: "UNAVAILABLE",
}


@dataclass(frozen=True, slots=True)
class TensorRequest:
    """Rows for one model; `outputs`: the names of those that are wanted, all for none."""

    model: str
    version: str
    request_id: str
    parameters: Mapping[str, Parameter]
    inputs: list[GivenTensor]
    outputs: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TensorResponse:
    """The outputs of all rows. `is_last`: no other response to the request follows."""

    model: str
    version: str
    request_id: str
    outputs: list[Tensor]
    is_last: bool = True


@dataclass(frozen=True, slots=True)
class RowSpans:
    """The names of spans: of a request with one row, of one with many, and of each of these."""

    one: Name
    many: Name
    row: Name = Spans.REQUEST


class TensorService:
    """Answers questions about models, and runs them. Raises NeuronpipeError."""

    def __init__(
        self,
        gateway: Gateway,
        settings: PipelineSettings,
        meters: Meters,
        is_ready: Callable[[], bool],
        control: ModelControl | None = None,
    ) -> None:
        """`control`: None where callers may not load models."""
        self.is_ready = is_ready
        self._pipeline = gateway.pipeline
        self._settings = settings
        self._meters = meters
        self._catalog = gateway.catalog
        self._control = control
        # By what a caller may use, as long as that stays.
        self._tables: WeakKeyDictionary[ModelTable[ServedModel[GatewayModel]], ModelTable[NamedModel]]
        self._tables = WeakKeyDictionary()

    @property
    def _models(self) -> ModelTable[NamedModel]:
        served = self._catalog.served
        if served not in self._tables:
            self._tables[served] = named_models(served)
        return self._tables[served]

    def server_metadata(self) -> dict[str, Any]:
        """ServerMetadataResponse."""
        extensions = [*EXTENSIONS, _CONTROL] if self._control else list(EXTENSIONS)
        return {"name": PLATFORM, "version": __version__, "extensions": extensions}

    def is_model_ready(self, name: str, version: str) -> bool:
        """Whether requests for a model make sense now. Raises ModelNotFound for one that could not be loaded either."""
        index = {(one["name"], one["version"]): one["state"] for one in self.index()}
        try:
            found = self._models.find(name, version)
            name, version = found.name, found.version
        except ModelNotFound:
            if not any(name == known and version in ("", number) for known, number in index):
                raise
        return self.is_ready() and index.get((name, version)) == "READY"

    def model_metadata(self, name: str, version: str) -> dict[str, Any]:
        """ModelMetadataResponse."""
        model = self._models.find(name, version)
        return model.metadata([one.version for one in self._models if one.name == model.name])

    def model_config(self, name: str, version: str) -> dict[str, Any]:
        """ModelConfig."""
        return self._models.find(name, version).config(self._settings.max_batch_items)

    def statistics(self, name: str, version: str) -> dict[str, Any]:
        """ModelStatisticsResponse: of one model; or of all that are served, under their own names."""
        models = (
            [self._models.find(name, version)] if name else [one for one in self._models if one.name == one.spec.name]
        )
        counted = [
            {"name": one.name, "version": one.version}
            | statistics_of(self._meters, ModelKey(one.spec.name, one.spec.version))
            for one in models
        ]
        return {"model_stats": counted}

    def index(self, *, only_ready: bool = False) -> list[dict[str, Any]]:
        """The models of RepositoryIndexResponse: those that are served, being loaded, or unloaded."""
        states = {(one.name, one.version): _state_of(one) for one in self._catalog.list_models().models}
        rows = {(one.name, one.version): states[one.spec.name, one.version] for one in self._models}
        unloaded = {(key.name, str(key.version)): ("UNAVAILABLE", "unloaded") for key in self._catalog.unloaded}
        return [
            {"name": name, "version": version, "state": state, "reason": reason}
            for (name, version), (state, reason) in sorted((unloaded | states | rows).items())
            if state == "READY" or not only_ready
        ]

    async def load(self, name: str, parameters: Mapping[str, Any], call: Call) -> None:
        """RepositoryModelLoad."""
        if parameters:
            raise InvalidInput("parameters", "there are none: bundles are served as they were compiled")
        await self._controlled.load(name, call.remaining_s)

    async def unload(self, name: str, call: Call) -> None:
        """RepositoryModelUnload."""
        await self._controlled.unload(name, call.remaining_s)

    @property
    def _controlled(self) -> ModelControl:
        if self._control is None:
            raise NotConfigured(_FIXED_MODELS)
        return self._control

    async def infer(self, request: TensorRequest, call: Call, spans: RowSpans) -> TensorResponse:
        """Runs all rows of a request; the first that fails ends the others."""
        model = self._find(request, call)
        wanted = model.wanted(request.outputs)
        options = read_options(request.parameters, model.model.parameters)
        tensors, rows = model.read(request.inputs, self._settings.max_batch_items)
        inputs = await self._read_rows(model, tensors, rows, options)
        own = options.call_for(call, request.request_id)
        if rows == 1:
            results = [await self._infer_row(own, model, options, inputs[0], spans.one)]
        else:
            runs = [
                partial(
                    self._infer_row, model=model, options=options, input=one, span=spans.row, row=row, inputs=tensors
                )
                for row, one in enumerate(inputs)
            ]
            results = await infer_together(self._pipeline, own, runs, spans.many, at_once=rows)
            self._check_size(results)
        outputs = model.model.write(results, wanted, tensors, self._settings.max_batch_response_bytes)
        return TensorResponse(model.name, model.version, request.request_id, outputs)

    async def stream(self, request: TensorRequest, call: Call, spans: RowSpans) -> AsyncGenerator[TensorResponse, None]:
        """The response of `infer`; with the parameter `stream`, the parts of a text as they come, and then its end."""
        model = self._find(request, call)
        if STREAM not in model.model.parameters or request.parameters.get(STREAM) is not True:
            yield await self.infer(request, call, spans)
            return
        wanted = model.wanted(request.outputs)
        given = {name: value for name, value in request.parameters.items() if name != STREAM}
        options = read_options(given, model.model.parameters)
        tensors, rows = model.read(request.inputs, self._settings.max_batch_items)
        if rows != 1:
            raise InvalidInput("inputs", f"{rows} rows, a stream of a text takes one")
        if given.get("num_return_sequences", 1) != 1:
            raise InvalidInput("num_return_sequences", "must be 1 with stream, whose parts are those of one text")
        ((packed, _),) = await self._read_rows(model, tensors, rows, options)
        own = options.call_for(call, request.request_id)
        asked = InferenceRequest(own, model.spec.name, model.version, packed, options.cache_control)
        async with aclosing(self._pipeline.generate(asked, spans.one)) as events:
            async for event in events:
                if isinstance(event, GenerateStart):
                    continue
                is_last = isinstance(event, InferenceResult)
                outputs = model.model.write(
                    [_part(event, own, model)], wanted, tensors, self._settings.max_batch_response_bytes
                )
                yield TensorResponse(model.name, model.version, request.request_id, outputs, is_last)

    async def _read_rows(
        self, model: NamedModel, tensors: Mapping[str, Tensor], rows: int, options: Options
    ) -> list[RowInput]:
        read = partial(model.model.read_rows, tensors, rows, options.of_task, self._settings.max_input_bytes)
        texts = (tensor.values for tensor in tensors.values() if tensor.datatype == BYTES)
        if sum(len(text) for values in texts for text in values) <= LARGE_BYTES:
            return read()
        return await asyncio.to_thread(read)

    def _find(self, request: TensorRequest, call: Call) -> NamedModel:
        """The model of a request; of several versions the one that its key chooses."""
        key = call.route_key or request.request_id or call.request_id or new_request_id()
        return self._models.find(request.model, request.version, key)

    async def _infer_row(
        self,
        call: Call,
        model: NamedModel,
        options: Options,
        input: RowInput,
        span: Name,
        row: int = 0,
        inputs: Mapping[str, Tensor] | None = None,
    ) -> InferenceResult:
        """One row's result. `inputs`: in a request of several rows, whose errors name the row."""
        packed, encoded = input
        request = InferenceRequest(call, model.spec.name, model.version, packed, options.cache_control, encoded)
        try:
            return await self._pipeline.infer(request, span)
        except InvalidInput as error:
            paths = ["id" if error.field == "request_id" else path for path in error.field.split(" and ")]
            names = [_in_row(path, row, inputs or {}) for path in paths]
            raise InvalidInput(" and ".join(names), error.problem) from error

    def _check_size(self, results: list[InferenceResult]) -> None:
        limit = self._settings.max_batch_response_bytes
        if sum(one.value.size_bytes for one in results) > limit:
            problem = (
                f"the results are too large for one response, the limit is {limit} bytes (the gateway's "
                "max_batch_response_bytes); send fewer rows at once"
            )
            raise InvalidInput("inputs", problem)


def _in_row(path: str, row: int, inputs: Mapping[str, Tensor]) -> str:
    """The path of a field in a request of several rows, whose tensors are named by the last word of the path."""
    name, bracket, index = path.partition("[")
    return f"{name}[{row}]{bracket}{index}" if name.rpartition(".")[2] in inputs else path


def _part(event: GeneratedPart | InferenceResult, call: Call, model: NamedModel) -> InferenceResult:
    """A part of a text as a result, or its end without the text that was in the parts."""
    if isinstance(event, GeneratedPart):
        text = GeneratedText(text=event.text, token_ids=event.token_ids, logprobs=event.logprobs)
    else:
        last = event.result.body.sequences[0]
        score = last.score if last.HasField("score") else None
        text = GeneratedText(finish_reason=last.finish_reason, score=score)
    result = TaskResult()
    getattr(result, model.spec.task).sequences.append(text)
    key = ModelKey(model.spec.name, model.spec.version)
    return InferenceResult(call.request_id, key, pack_result(result), Usage(), StageTimings())


def _state_of(model: Model) -> tuple[str, str]:
    """The state in the protocol's words, and the reason for it."""
    state = _STATES.get(model.state, "READY")
    return state, model.problem if state == "UNAVAILABLE" else ""
