"""The part of the protocol that gRPC and HTTP share. Answers are the messages of oip/v2 as JSON, except tensors.

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
from neuronpipe.api.v1.tasks_pb2 import GeneratedText
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
from neuronpipe.core.packed import pack_texts
from neuronpipe.core.tracing import new_request_id
from neuronpipe.doors.oip.models import PLATFORM, NamedModel, named_models, statistics_of
from neuronpipe.doors.oip.options import Options, read_options
from neuronpipe.doors.oip.task_model import STREAM
from neuronpipe.doors.oip.tensors import BYTES, GivenTensor, NamedTensor, Parameter, RowInput
from neuronpipe.gateway.access import check_may_change, registry_of
from neuronpipe.gateway.assembly import Gateway
from neuronpipe.gateway.many import infer_together
from neuronpipe.gateway.requests import GeneratedPart, InferenceRequest, InferenceResult
from neuronpipe.gateway.routing import GatewayModel, VersionRouter
from neuronpipe.gateway.settings import PipelineSettings
from neuronpipe.gateway.tenants.tenants import Tenants
from neuronpipe.platform.process.in_flight import LARGE_BYTES


class ModelControl:
    """Changes one registry. `tenants`: None where every caller may change it.

    Every method raises NotAllowed, ModelNotFound, ChangeRefused and DeadlineExceeded.
    """

    def __init__(self, repository: Repository, tenants: Tenants | None, router: VersionRouter) -> None:
        self._repository, self._tenants, self._router = repository, tenants, router

    async def load(self, name: str, limit_s: float | None) -> None:
        """Loads a model, and returns when every version that its names and shares need is ready here."""
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
        """Unloads every version of a model, and returns when new requests do not get the model any more."""
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
        """Waits until this gateway follows a revision of the registry and `is_done` returns true."""
        changed = asyncio.Event()
        unwatch = self._router.changes.watch(changed.set)
        try:
            async with asyncio.timeout(limit_s):
                while self._router.revision < revision or not is_done():
                    changed.clear()
                    await changed.wait()
        except TimeoutError:
            raise DeadlineExceeded("the registry has the change; the gateway has not followed it in time") from None
        finally:
            unwatch()


# The protocol's names of the extensions that are supported.
EXTENSIONS = ("binary_tensor_data", "model_configuration", "parameters", "schedule_policy", "statistics")
# The extension for loading and unloading, if callers may do so.
_CONTROL = "model_repository"
_FIXED_MODELS = (
    "models are loaded as the registry of the repository says: use `neuronpipe registry`, or start the gateway with "
    "--model-control"
)
# Reasons why Triton's other methods are not served.
NO_SHARED_MEMORY = "there is no shared memory: send tensors in the request"
SETTINGS_OF_TRACES = "traces are set up by the server's options"
SETTINGS_OF_LOGS = "logs are set up by the server's options"
# Versions in other states are READY: a model that is loaded on demand takes requests.
_STATES = {
    VersionState.VERSION_STATE_LOADING: "LOADING",
    VersionState.VERSION_STATE_DRAINING: "UNLOADING",
    VersionState.VERSION_STATE_FAILED: "UNAVAILABLE",
}


@dataclass(frozen=True, slots=True)
class TensorRequest:
    """Rows for one model. `outputs`: the names of the wanted outputs; empty for all outputs."""

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
    outputs: list[NamedTensor]
    is_last: bool = True


@dataclass(frozen=True, slots=True)
class RowSpans:
    """The names of spans for a request with a single row, for a request with several rows, and for each of its rows."""

    single: Name
    several: Name
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
        self._pipeline, self._catalog = gateway.pipeline, gateway.catalog
        self._settings, self._meters, self._control = settings, meters, control
        # Models that a caller may use → their names in the protocol, as long as the models stay the same.
        self._tables: WeakKeyDictionary[ModelTable[ServedModel[GatewayModel]], ModelTable[NamedModel]]
        self._tables = WeakKeyDictionary()

    @property
    def _models(self) -> ModelTable[NamedModel]:
        served = self._catalog.served
        if served not in self._tables:
            self._tables[served] = named_models(served)
        return self._tables[served]

    def server_metadata(self) -> dict[str, Any]:
        extensions = [*EXTENSIONS, _CONTROL] if self._control else list(EXTENSIONS)
        return {"name": PLATFORM, "version": __version__, "extensions": extensions}

    def is_model_ready(self, name: str, version: str) -> bool:
        """Returns whether a model answers requests now. Raises ModelNotFound for a model that is neither served nor
        loadable.
        """
        index = {(row["name"], row["version"]): row["state"] for row in self.index()}
        try:
            model = self._models.find(name, version)
            name, version = model.name, model.version
        except ModelNotFound:
            if not any(name == indexed_name and version in ("", number) for indexed_name, number in index):
                raise
        return self.is_ready() and index.get((name, version)) == "READY"

    def model_metadata(self, name: str, version: str) -> dict[str, Any]:
        model = self._models.find(name, version)
        return model.metadata([other.version for other in self._models if other.name == model.name])

    def model_config(self, name: str, version: str) -> dict[str, Any]:
        return self._models.find(name, version).config(self._settings.max_batch_items)

    def statistics(self, name: str, version: str) -> dict[str, Any]:
        """Returns a ModelStatisticsResponse for one model, or without a name for all models under their own names."""
        models = [model for model in self._models if model.name == model.spec.name]
        if name:
            models = [self._models.find(name, version)]
        counted = [
            {"name": model.name, "version": model.version}
            | statistics_of(self._meters, ModelKey(model.spec.name, model.spec.version))
            for model in models
        ]
        return {"model_stats": counted}

    def index(self, *, only_ready: bool = False) -> list[dict[str, Any]]:
        """Returns the models of a RepositoryIndexResponse, which are served, being loaded, or unloaded."""
        states = {(model.name, model.version): _state_of(model) for model in self._catalog.list_models().models}
        rows = {(model.name, model.version): states[model.spec.name, model.version] for model in self._models}
        unloaded = {(key.name, str(key.version)): ("UNAVAILABLE", "unloaded") for key in self._catalog.unloaded}
        return [
            {"name": name, "version": version, "state": state, "reason": reason}
            for (name, version), (state, reason) in sorted((unloaded | states | rows).items())
            if state == "READY" or not only_ready
        ]

    async def load(self, name: str, parameters: Mapping[str, Any], call: Call) -> None:
        """Loads a model, as RepositoryModelLoad does."""
        if parameters:
            raise InvalidInput("parameters", "there are none: bundles are served as they were compiled")
        await self._controlled.load(name, call.remaining_s)

    async def unload(self, name: str, call: Call) -> None:
        """Unloads a model, as RepositoryModelUnload does."""
        await self._controlled.unload(name, call.remaining_s)

    @property
    def _controlled(self) -> ModelControl:
        if self._control is None:
            raise NotConfigured(_FIXED_MODELS)
        return self._control

    async def infer(self, request: TensorRequest, call: Call, spans: RowSpans) -> TensorResponse:
        """Runs all rows of a request. The first row that fails ends the other rows."""
        model = self._find(request, call)
        wanted = model.wanted(request.outputs)
        options = read_options(request.parameters, model.model.parameters)
        tensors, rows = model.read(request.inputs, self._settings.max_batch_items)
        inputs = await self._read_rows(model, tensors, rows, options)
        request_call = options.call_for(call, request.request_id)
        if rows == 1:
            results = [await self._infer_row(request_call, model, options, inputs[0], spans.single)]
        else:
            run = partial(self._infer_row, model=model, options=options, span=spans.row, inputs=tensors)
            runs = [partial(run, input=input, row=row) for row, input in enumerate(inputs)]
            results = await infer_together(self._pipeline, request_call, runs, spans.several, at_once=rows)
            self._check_size(results)
        outputs = model.model.write(results, wanted, tensors, self._settings.max_batch_response_bytes)
        return TensorResponse(model.name, model.version, request.request_id, outputs)

    async def stream(self, request: TensorRequest, call: Call, spans: RowSpans) -> AsyncGenerator[TensorResponse, None]:
        """Yields the response of `infer`, or with the parameter `stream` the parts of a text, and then its end."""
        model = self._find(request, call)
        if STREAM not in model.model.parameters or request.parameters.get(STREAM) is not True:
            yield await self.infer(request, call, spans)
            return
        wanted = model.wanted(request.outputs)
        parameters = {name: value for name, value in request.parameters.items() if name != STREAM}
        options = read_options(parameters, model.model.parameters)
        tensors, rows = model.read(request.inputs, self._settings.max_batch_items)
        if rows != 1:
            raise InvalidInput("inputs", f"{rows} rows, a stream of a text takes one")
        if parameters.get("num_return_sequences", 1) != 1:
            raise InvalidInput("num_return_sequences", "must be 1 with stream, whose parts are those of one text")
        ((packed, _),) = await self._read_rows(model, tensors, rows, options)
        request_call = options.call_for(call, request.request_id)
        row_request = InferenceRequest(request_call, model.spec.name, model.version, packed, options.cache_control)
        async with aclosing(self._pipeline.generate(row_request, spans.single)) as events:
            async for event in events:
                if isinstance(event, GenerateStart):
                    continue
                is_last = isinstance(event, InferenceResult)
                outputs = model.model.write(
                    [_part(event, request_call, model)], wanted, tensors, self._settings.max_batch_response_bytes
                )
                yield TensorResponse(model.name, model.version, request.request_id, outputs, is_last)

    async def _read_rows(
        self, model: NamedModel, tensors: Mapping[str, NamedTensor], rows: int, options: Options
    ) -> list[RowInput]:
        read = partial(model.model.read_rows, tensors, rows, options.of_task, self._settings.max_input_bytes)
        texts = (tensor.values for tensor in tensors.values() if tensor.datatype == BYTES)
        if sum(len(text) for values in texts for text in values) <= LARGE_BYTES:
            return read()
        return await asyncio.to_thread(read)

    def _find(self, request: TensorRequest, call: Call) -> NamedModel:
        """Returns the model of a request, in the version that the key of the request chooses."""
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
        inputs: Mapping[str, NamedTensor] | None = None,
    ) -> InferenceResult:
        """Returns the result of a row. `inputs`: the inputs of a request of several rows, whose errors name the row."""
        packed, encoded = input
        request = InferenceRequest(
            call, model.spec.name, model.version, packed, cache_control=options.cache_control, encoded=encoded
        )
        try:
            return await self._pipeline.infer(request, span)
        except InvalidInput as error:
            paths = ["id" if error.field == "request_id" else path for path in error.field.split(" and ")]
            names = [_in_row(path, row, inputs or {}) for path in paths]
            raise InvalidInput(" and ".join(names), error.problem) from error

    def _check_size(self, results: list[InferenceResult]) -> None:
        limit = self._settings.max_batch_response_bytes
        if sum(result.value.size_bytes for result in results) > limit:
            problem = f"the results are too large for one response, the limit is {limit} bytes"
            raise InvalidInput("inputs", f"{problem}; send fewer rows at once")


def _in_row(path: str, row: int, inputs: Mapping[str, NamedTensor]) -> str:
    """Returns the path of a field in a request of several rows, whose tensors have the last word of the path."""
    name, bracket, index = path.partition("[")
    return f"{name}[{row}]{bracket}{index}" if name.rpartition(".")[2] in inputs else path


def _part(event: GeneratedPart | InferenceResult, call: Call, model: NamedModel) -> InferenceResult:
    """Returns a part of a text as a result, or the end of the text without the text itself."""
    if isinstance(event, GeneratedPart):
        text = GeneratedText(text=event.text, token_ids=event.token_ids, logprobs=event.logprobs)
    else:
        last = event.texts[0]
        score = last.score if last.HasField("score") else None
        text = GeneratedText(finish_reason=last.finish_reason, score=score)
    key = ModelKey(model.spec.name, model.spec.version)
    return InferenceResult(call.request_id, key, pack_texts(model.spec.task, [text]), Usage(), StageTimings())


def _state_of(model: Model) -> tuple[str, str]:
    """Returns the state of a version in the protocol's words, and the reason for the state."""
    state = _STATES.get(model.state, "READY")
    return state, model.problem if state == "UNAVAILABLE" else ""
