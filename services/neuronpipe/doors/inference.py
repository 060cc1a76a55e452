"""Runs inputs of the protocols through the pipeline: one input, or many inputs that must all succeed.

A request may name no model where its protocol is for servers of one model: then a default model answers.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain
from typing import Any, NamedTuple, TypeVar

from neuronpipe.api.v1.inference_pb2 import CacheControl, Priority, Usage
from neuronpipe.api.v1.tasks_pb2 import ScoreFunction, TaskInput, TokenizationInput, Truncation
from neuronpipe.core.calls import Call
from neuronpipe.core.errors import CUT, InvalidInput, ModelNotFound, NeuronpipeError, SetupError
from neuronpipe.core.model import ModelSpec, base_name
from neuronpipe.core.names import Name, Spans
from neuronpipe.core.packed import pack_input
from neuronpipe.core.units import words_of
from neuronpipe.doors.text_stream import begun, side_by_side
from neuronpipe.doors.vectors import joined_texts, lists_of_texts, results_of_texts
from neuronpipe.gateway.catalog import Catalog
from neuronpipe.gateway.many import infer_together
from neuronpipe.gateway.pipeline import Pipeline
from neuronpipe.gateway.requests import InferenceRequest, InferenceResult, TextEvent
from neuronpipe.gateway.settings import PipelineSettings, parse_aliases

# Fields beside a protocol: headers over HTTP, metadata over gRPC.
MODEL_FIELD = "neuronpipe-model"
VERSION_FIELD = "neuronpipe-version"
PRIORITY_FIELD = "neuronpipe-priority"
REQUEST_ID_FIELD = "x-request-id"
# Our names of these fields → the protocols' names.
_FIELDS_BESIDE = {"version": VERSION_FIELD, "request_id": REQUEST_ID_FIELD}
_PRIORITIES = {
    "": Priority.PRIORITY_INTERACTIVE,
    "interactive": Priority.PRIORITY_INTERACTIVE,
    "bulk": Priority.PRIORITY_BULK,
}
# Names that clients of servers of one model send where they have none: the name of huggingface_hub, the names of TGI's
# and TEI's documentation, and the server's address, which Hugging Face's client for JavaScript sends.
_ANY_MODEL = re.compile(r"dummy|tgi|text-embeddings-inference|https?://.*", re.DOTALL)
_CACHED = CacheControl.CACHE_CONTROL_UNSPECIFIED
# Largest results that are written on the event loop: making lists of larger results takes up to 30 ms.
_LARGE_BYTES = 64 << 10

MadeT = TypeVar("MadeT")
# A protocol's names for the fields of a TaskInput, for errors. The index of the input replaces `…`: `inputs…` becomes
# inputs[3], or inputs where the request has a single input. A protocol without a name for truncation never cuts.
FieldNames = dict[str, str]


class ModelName(NamedTuple):
    """A model in a caller's words. Without a version: the route's choice, or the newest; without a name: a default."""

    name: str
    version: str = ""


class ModelCall(NamedTuple):
    """A call of a model. `fields`, `input_index`: the protocol's names for an input, for errors; see FieldNames."""

    call: Call
    model: ModelName
    fields: FieldNames
    input_index: int | None = None
    bypasses_cache: bool = False

    def request(self, input: TaskInput) -> InferenceRequest:
        """Returns the request for the pipeline."""
        cache_control = CacheControl.CACHE_CONTROL_BYPASS if self.bypasses_cache else _CACHED
        return InferenceRequest(self.call, *self.model, pack_input(input), cache_control)

    def renamed(self, error: InvalidInput) -> InvalidInput:
        """Returns the error of an input with the protocol's names."""
        return _renamed(error, self.fields, self.input_index)


@dataclass(frozen=True, slots=True)
class Inputs:
    """The values in the field `name` of a request, and the function that makes an input of each value.

    `is_list`: whether errors name the index of an input. `check`: raises InvalidInput for values that all inputs share.
    `bypasses_cache`: whether all results are computed, and not kept.
    """

    name: str
    values: Sequence[Any]
    make: Callable[[Any], TaskInput]
    fields: FieldNames
    is_list: bool = True
    check: Callable[[], None] = lambda: None
    bypasses_cache: bool = False

    def made(self, limit: int) -> list[TaskInput]:
        """Makes the inputs, at most `limit`. Raises InvalidInput."""
        if not 1 <= len(self.values) <= limit:
            raise InvalidInput(self.name, f"{len(self.values)} inputs, must be from 1 to {limit}")
        inputs: list[TaskInput] = []
        try:
            self.check()
            for value in self.values:
                inputs.append(self.make(value))  # noqa: PERF401 (the error below needs the index)
        except InvalidInput as error:
            raise _renamed(error, self.fields, len(inputs) if self.is_list else None) from error
        return inputs


class Inference:
    """The models and the pipeline of a gateway, as the protocols use them."""

    def __init__(
        self, pipeline: Pipeline, catalog: Catalog, settings: PipelineSettings, default_models: str = ""
    ) -> None:
        """`default_models`: names with commas, the preferred model first. Raises SetupError if a name is unknown."""
        self.pipeline, self.catalog, self.settings = pipeline, catalog, settings
        self.aliases = parse_aliases(settings.model_aliases)
        self._defaults = words_of(default_models)
        for name in self._defaults:
            if name not in catalog.names():
                raise SetupError(f"default_models: {name} is not served; served are: {', '.join(catalog.names())}")

    def choose(self, requested: ModelName, task: str = "") -> ModelName:
        """Returns the model that a request names, a default model, or the task's only model. Raises NeuronpipeError."""
        if _ANY_MODEL.fullmatch(requested.name):
            with suppress(ModelNotFound):
                self.catalog.spec(requested.name)
                return requested
        elif requested.name:
            return requested
        names = self.catalog.names(task)
        needed = f"the task {task}" if task else "any task"
        if not names:
            raise ModelNotFound(f"no model has {needed}")
        for name in self._defaults:
            if name in names:
                return ModelName(name, requested.version)
        names = [name for name in names if base_name(name) == name or base_name(name) not in names]
        if len(names) > 1:
            raise InvalidInput(
                "model", f"is missing; several models have {needed}: {', '.join(names)} (or set default_models)"
            )
        return ModelName(names[0], requested.version)

    def spec(self, model: ModelName) -> ModelSpec:
        """Returns the description of a model. Raises ModelNotFound, and InvalidInput in the protocol's words."""
        try:
            return self.catalog.spec(*model)
        except InvalidInput as error:
            raise _renamed(error, {}, None) from error

    async def infer_one(
        self, model_call: ModelCall, input: TaskInput, span: Name = Spans.HTTP_REQUEST
    ) -> InferenceResult:
        """Returns the result of one input. Raises NeuronpipeError, in the protocol's words."""
        try:
            return await self.pipeline.infer(model_call.request(input), span)
        except InvalidInput as error:
            raise model_call.renamed(error) from error

    async def count_tokens(self, model_call: ModelCall, input: TaskInput) -> int:
        """Returns the number of tokens of a chat, an input of text-generation. Raises as `infer_one`."""
        chat = TaskInput(tokenization=TokenizationInput(chat=input.text_generation))
        result = await self.infer_one(model_call, chat)
        tokens: int = result.result.message.tokenization.chat_tokens
        return tokens

    async def each(self, call: Call, model: ModelName, request_inputs: Inputs) -> list[InferenceResult]:
        """Returns the results of all inputs. The first error ends all of them.

        At most max_batch_items requests run at once in the pipeline. A request for a static model has many texts.
        """
        inputs = request_inputs.made(self.settings.max_http_inputs)
        first_index = 0 if request_inputs.is_list else None
        whole_call = ModelCall(call, model, request_inputs.fields, first_index, request_inputs.bypasses_cache)
        if len(inputs) == 1:
            return [await self.infer_one(whole_call, inputs[0])]
        limit_bytes = left_bytes = self.settings.max_batch_response_bytes

        async def run(shared: Call, first: int, together: list[TaskInput]) -> list[InferenceResult]:
            nonlocal left_bytes
            model_call = whole_call._replace(call=shared, input_index=first if request_inputs.is_list else None)
            if len(together) == 1:
                results = [await self.infer_one(model_call, together[0])]
            else:
                results = await self._infer_texts(model_call, together)
            left_bytes -= sum([result.result.size_bytes for result in results])
            if left_bytes < 0:
                problem = f"the results are too large for one response, the limit is {limit_bytes} bytes"
                raise InvalidInput(request_inputs.name, f"{problem}; send fewer at once")
            return results

        lists = lists_of_texts(inputs) if self._is_static(model) else [[input] for input in inputs]
        firsts = accumulate(map(len, lists), initial=0)
        runs = [partial(run, first=first, together=together) for first, together in zip(firsts, lists, strict=False)]
        at_once = self.settings.max_batch_items
        results = await infer_together(self.pipeline, call, runs, Spans.HTTP_BATCH, at_once=at_once)
        return [*chain.from_iterable(results)]

    def _is_static(self, model: ModelName) -> bool:
        with suppress(NeuronpipeError):  # for an unserved model the pipeline raises the better error
            return self.catalog.spec(*model).is_static
        return False

    async def _infer_texts(self, first_call: ModelCall, inputs: Sequence[TaskInput]) -> list[InferenceResult]:
        """Returns the results of texts with the same options. The pipeline gets the texts as one input. `first_call`:
        the call of the first text. The first result has the usage of all.
        """
        try:
            result = await self.pipeline.infer(first_call.request(joined_texts(inputs)), Spans.HTTP_REQUEST)
        except InvalidInput as error:
            if (place := error.index_in("texts")) is None:
                raise first_call._replace(input_index=None).renamed(error) from error
            own = InvalidInput("text", error.problem, error.mentions)
            raise first_call._replace(input_index=(first_call.input_index or 0) + place).renamed(own) from error
        return [
            result._replace(value=own, usage=Usage() if number else result.usage)
            for number, own in enumerate(results_of_texts(result.result.message, len(inputs)))
        ]

    async def stream(self, model_call: ModelCall, input: TaskInput) -> AsyncGenerator[TextEvent, None]:
        """Returns a text's events, which the caller closes, once the first part has come. Raises as `infer_one`."""
        return await begun(self._events(model_call, input))

    async def stream_each(
        self, call: Call, model: ModelName, request_inputs: Inputs
    ) -> AsyncGenerator[tuple[int, TextEvent], None]:
        """Returns the events of the texts of all inputs, side by side, each with its input's index. See `stream`."""
        inputs = request_inputs.made(self.settings.max_batch_items)
        whole_call = ModelCall(call, model, request_inputs.fields)
        return await begun(self._side_by_side(whole_call, inputs, is_list=request_inputs.is_list))

    async def _side_by_side(
        self, whole_call: ModelCall, inputs: Sequence[TaskInput], *, is_list: bool
    ) -> AsyncGenerator[tuple[int, TextEvent], None]:
        call = whole_call.call
        together = self.pipeline.observe_together(call, Spans.HTTP_BATCH) if inputs[1:] else nullcontext(call)
        with together as shared:
            streams = [
                self._events(whole_call._replace(call=shared, input_index=number if is_list else None), input)
                for number, input in enumerate(inputs)
            ]
            async with aclosing(side_by_side(streams)) as events:
                async for event in events:
                    yield event

    async def _events(self, model_call: ModelCall, input: TaskInput) -> AsyncGenerator[TextEvent, None]:
        try:
            async with aclosing(self.pipeline.generate(model_call.request(input))) as events:
                async for event in events:
                    yield event
        except InvalidInput as error:
            raise model_call.renamed(error) from error


def _renamed(error: InvalidInput, fields: FieldNames, index: int | None) -> InvalidInput:
    """Returns the error with a protocol's own names instead of the names of the proto."""
    place = "" if index is None else f"[{index}]"
    fields = _FIELDS_BESIDE | {ours: theirs.replace("…", place) for ours, theirs in fields.items()}
    parts = error.field.split(" and ")
    field = fields.get(error.field) or " and ".join(_name(part, fields) for part in parts)
    problem, rest = "", error.problem
    for mention in error.mentions:
        word, protocol_words = _mention(mention, fields)
        before, found, rest = rest.partition(word)
        problem += before + (protocol_words if found else "")
    return InvalidInput(field, problem + rest)


def _mention(path: str, fields: FieldNames) -> tuple[str, str]:
    """Returns the words with which a problem mentions a field, and a protocol's words for the same."""
    if path == "truncation":
        return CUT, f"set {fields[path]} to cut" if path in fields else "send less"
    word = path.rpartition(".")[2]
    return word, fields.get(path) or fields.get(word, word)


def _name(path: str, fields: FieldNames) -> str:
    """Returns a protocol's name of a field, or of an element of a field."""
    name, bracket, index = path.partition("[")
    return fields.get(path) or fields.get(name, name) + bracket + index


async def of_results(
    results: Sequence[InferenceResult], make: Callable[[], MadeT], *, large_bytes: int = _LARGE_BYTES
) -> MadeT:
    """Runs `make`, which writes results, in a thread where they are large, because other requests would wait."""
    if sum(result.result.size_bytes for result in results) <= large_bytes:
        return make()
    return await asyncio.to_thread(make)


def read_priority(word: str) -> "Priority.ValueType":
    """Returns the priority that a word stands for. Raises InvalidInput."""
    if word not in _PRIORITIES:
        raise InvalidInput(PRIORITY_FIELD, "must be interactive or bulk")
    return _PRIORITIES[word]


def truncation_of(truncate: bool | str | None, direction: str | None) -> "Truncation.ValueType":
    """Returns the truncation of Hugging Face's two options. Without them the setting long_texts decides."""
    if truncate is None:
        return Truncation.TRUNCATION_UNSPECIFIED
    if not truncate or truncate == "do_not_truncate":
        return Truncation.TRUNCATION_ERROR
    return Truncation.TRUNCATION_LEFT if direction and direction.lower() == "left" else Truncation.TRUNCATION_RIGHT


def cut_fields(limit: int | None, direction: str | None) -> dict[str, Any]:
    """Returns the fields of an input that cut it to `limit` tokens, as vLLM's truncate_prompt_tokens.

    -1 cuts to what the model takes. None leaves the decision to the setting long_texts.
    """
    return {
        "truncation": truncation_of(None if limit is None else True, direction),
        "truncation_tokens": max(limit or 0, 0),
    }


def score_function(is_raw: bool) -> "ScoreFunction.ValueType":
    """Returns the function that a model applies to its scores: none for raw scores, otherwise its own."""
    return ScoreFunction.SCORE_FUNCTION_NONE if is_raw else ScoreFunction.SCORE_FUNCTION_UNSPECIFIED


def check_second(field: str, texts: Sequence[str]) -> None:
    """Raises InvalidInput if the second text is empty: a task would take the first text alone."""
    if "" in texts:
        raise InvalidInput(field, "the second text is empty; send the first one alone, or a text")
