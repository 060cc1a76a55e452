"""Calls the pipeline for the protocols: with one input, or with many inputs that must all succeed.

It also chooses the model of a request that may name none, as in protocols of servers of one model, and reads the fields
that a request has beside its protocol: headers over HTTP, metadata over gRPC.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

from neuronpipe.api.v1.inference_pb2 import Priority
from neuronpipe.api.v1.tasks_pb2 import TaskInput, Truncation
from neuronpipe.core.calls import Call
from neuronpipe.core.errors import CUT, InvalidInput, ModelNotFound, SetupError
from neuronpipe.core.names import Name, Spans
from neuronpipe.core.packed import pack_input
from neuronpipe.doors.text_stream import begun, side_by_side
from neuronpipe.gateway.catalog import Catalog
from neuronpipe.gateway.inference import InferenceRequest, InferenceResult, TextEvent
from neuronpipe.gateway.many import infer_together
from neuronpipe.gateway.pipeline import Pipeline
from neuronpipe.gateway.settings import PipelineSettings

MODEL_FIELD = "neuronpipe-model"
VERSION_FIELD = "neuronpipe-version"
PRIORITY_FIELD = "neuronpipe-priority"
_PRIORITIES = {
    "": Priority.PRIORITY_INTERACTIVE,
    "interactive": Priority.PRIORITY_INTERACTIVE,
    "bulk": Priority.PRIORITY_BULK,
}


class ModelName(NamedTuple):
    """A model in a caller's words. Without a name a default model answers, without a version the newest."""

    name: str
    version: str = ""


# Names that clients of servers of one model send where they have none: the name of huggingface_hub, the names of TGI's
# and TEI's documentation, and the server's address, which Hugging Face's client for JavaScript sends.
_ANY_MODEL = re.compile(r"dummy|tgi|text-embeddings-inference|https?://.*", re.DOTALL)


class ModelChoice:
    """Finds models by task. `defaults`: names with commas, the first that has the task wins."""

    def __init__(self, catalog: Catalog, defaults: str) -> None:
        """Raises SetupError for a default that is not served."""
        self._catalog = catalog
        self._defaults = [name for name in map(str.strip, defaults.split(",")) if name]
        served = catalog.names()
        for name in self._defaults:
            if name not in served:
                raise SetupError(f"default_models: {name} is not served; served are: {', '.join(served)}")

    def choose(self, given: ModelName, task: str = "") -> ModelName:
        """The model that a request names, or else a default one, or the only one that has the task.

        Raises NeuronpipeError.
        """
        if _ANY_MODEL.fullmatch(given.name):
            with suppress(ModelNotFound):
                self._catalog.spec(given.name)
                return given
        elif given.name:
            return given
        names = self._catalog.names(task)
        what = f"the task {task}" if task else "any task"
        if not names:
            raise ModelNotFound(f"no model has {what}")
        for name in self._defaults:
            if name in names:
                return ModelName(name, given.version)
        if len(names) > 1:
            raise InvalidInput(
                "model", f"is missing; several models have {what}: {', '.join(names)} (or set default_models)"
            )
        return ModelName(names[0], given.version)


def read_priority(word: str) -> "Priority.ValueType":
    """The priority that a word stands for. Raises InvalidInput."""
    if word not in _PRIORITIES:
        raise InvalidInput(PRIORITY_FIELD, "must be interactive or bulk")
    return _PRIORITIES[word]


GivenT = TypeVar("GivenT")
MadeT = TypeVar("MadeT")
# Largest results that are written on the event loop: making lists of larger ones takes up to 30 ms.
_LARGE_BYTES = 64 << 10
# A protocol's names for the fields of a TaskInput, which errors name. A protocol without a name for truncation never
# cuts.
Fields = Mapping[str, str]


class Inference:
    """Runs inputs through the pipeline."""

    def __init__(self, pipeline: Pipeline, settings: PipelineSettings) -> None:
        self.max_inputs, self.max_input_bytes = settings.max_http_inputs, settings.max_input_bytes
        self._at_once = settings.max_batch_items
        self._pipeline = pipeline
        self._max_bytes = settings.max_batch_response_bytes

    async def one(
        self, call: Call, model: ModelName, input: TaskInput, fields: Fields, span: Name = Spans.HTTP_REQUEST
    ) -> InferenceResult:
        """One result, of a request with a span of this name. Raises NeuronpipeError, in the protocol's words."""
        with _in_words(fields):
            return await self._pipeline.infer(InferenceRequest(call, *model, pack_input(input)), span)

    async def stream(
        self, call: Call, model: ModelName, input: TaskInput, fields: Fields
    ) -> AsyncGenerator[TextEvent, None]:
        """A text as it comes, and its result. The caller closes it.

        Returns when there is a part. Raises NeuronpipeError, in the protocol's words, as the generator does.
        """
        return await begun(self._told(call, model, input, fields))

    async def stream_each(
        self,
        call: Call,
        model: ModelName,
        given: Sequence[GivenT],
        make: Callable[[GivenT], TaskInput],
        name: str,
        fields: Callable[[int], Fields],
    ) -> AsyncGenerator[tuple[int, TextEvent], None]:
        """The texts of many inputs as they come, side by side, each event with the place of its input; else as `stream`
        and `each`.
        """
        inputs = self._make_inputs(given, make, name, self._at_once, "max_batch_items")
        return await begun(self._side_by_side(call, model, inputs, fields))

    async def _side_by_side(
        self, call: Call, model: ModelName, inputs: Sequence[TaskInput], fields: Callable[[int], Fields]
    ) -> AsyncGenerator[tuple[int, TextEvent], None]:
        together = self._pipeline.observe_together(call, Spans.HTTP_BATCH) if inputs[1:] else nullcontext(call)
        with together as shared:
            streams = [self._told(shared, model, input, fields(place)) for place, input in enumerate(inputs)]
            async with aclosing(side_by_side(streams)) as events:
                async for event in events:
                    yield event

    async def _told(
        self, call: Call, model: ModelName, input: TaskInput, fields: Fields
    ) -> AsyncGenerator[TextEvent, None]:
        """A text as it comes, with errors in the protocol's words."""
        request = InferenceRequest(call, *model, pack_input(input))
        with _in_words(fields):
            async with aclosing(self._pipeline.generate(request)) as events:
                async for event in events:
                    yield event

    async def each(
        self,
        call: Call,
        model: ModelName,
        given: Sequence[GivenT],
        make: Callable[[GivenT], TaskInput],
        name: str,
        fields: Callable[[int], Fields],
    ) -> list[InferenceResult]:
        """The results of many inputs, which are called `name` and have `fields` by their place.

        `make` makes an input of a value that the caller gave, once these are not too many. As many run at once as one
        InferBatch may have. The first error ends all of them.
        """
        inputs = self._make_inputs(given, make, name, self.max_inputs, "max_http_inputs")
        if len(inputs) == 1:
            return [await self.one(call, model, inputs[0], fields(0))]
        left_bytes = self._max_bytes

        async def run(shared: Call, place: int, input: TaskInput) -> InferenceResult:
            nonlocal left_bytes
            result = await self.one(shared, model, input, fields(place))
            left_bytes -= result.result.size_bytes
            if left_bytes < 0:
                limit = f"the limit is {self._max_bytes} bytes (the gateway's max_batch_response_bytes)"
                raise InvalidInput(name, f"the results are too large for one response, {limit}; send fewer at once")
            return result

        runs = [partial(run, place=place, input=input) for place, input in enumerate(inputs)]
        return await infer_together(self._pipeline, call, runs, Spans.HTTP_BATCH, at_once=self._at_once)

    def _make_inputs(
        self, given: Sequence[GivenT], make: Callable[[GivenT], TaskInput], name: str, limit: int, setting: str
    ) -> Sequence[TaskInput]:
        if not 1 <= len(given) <= limit:
            raise InvalidInput(name, f"{len(given)} inputs, must be from 1 to {limit} (the gateway's {setting})")
        return [make(one) for one in given]


@contextmanager
def _in_words(fields: Fields) -> Iterator[None]:
    """Errors name fields as the protocol does."""
    try:
        yield
    except InvalidInput as error:
        raise _renamed(error, fields) from error


def _renamed(error: InvalidInput, fields: Fields) -> InvalidInput:
    """The error with a protocol's own names instead of the names of the proto."""
    parts = error.field.split(" and ")
    field = fields.get(error.field) or " and ".join(_name(part, fields) for part in parts)
    problem, rest = "", error.problem
    for mention in error.mentions:
        word = mention.rpartition(".")[2]
        own = fields.get(mention) or fields.get(word, word)
        if mention == "truncation":
            word, own = CUT, f"set {own} to cut" if mention in fields else "send less"
        before, found, rest = rest.partition(word)
        problem += before + (found and own)
    return InvalidInput(field, problem + rest)


def _name(path: str, fields: Fields) -> str:
    """A protocol's name of a field, or of an element of a field."""
    name, bracket, index = path.partition("[")
    return fields.get(path) or fields.get(name, name) + bracket + index


async def of_results(
    results: Sequence[InferenceResult], make: Callable[[], MadeT], *, large_bytes: int = _LARGE_BYTES
) -> MadeT:
    """Runs `make`, which writes results, in a thread where they are large, because other requests would wait."""
    if sum(one.result.size_bytes for one in results) <= large_bytes:
        return make()
    return await asyncio.to_thread(make)


def truncation_of(truncate: bool | str | None, direction: str | None) -> "Truncation.ValueType":
    """The truncation of Hugging Face's two options. Without them a text that is too long is an error."""
    if not truncate or truncate == "do_not_truncate":
        return Truncation.TRUNCATION_ERROR
    return Truncation.TRUNCATION_LEFT if direction and direction.lower() == "left" else Truncation.TRUNCATION_RIGHT


def check_second(place: str, texts: Sequence[str]) -> None:
    """Raises InvalidInput for a second text that is empty: a task would take the first one alone."""
    if "" in texts:
        raise InvalidInput(place, "the second text is empty; send the first one alone, or a text")


def kept_tokens(kept: int | None, direction: str | None) -> dict[str, Any]:
    """The fields of vLLM's truncate_prompt_tokens; -1: as many tokens as the model takes."""
    return {"truncation": truncation_of(kept is not None, direction), "truncation_tokens": max(kept or 0, 0)}
