"""Requests that generate: the texts of one request side by side, whose tokens become text as they come.

Post-processing is a pure function of the tokens that are no text yet and of the tokens before them, so another process
may decode each part.
"""

import asyncio
import time
from collections.abc import Iterable
from contextlib import aclosing
from dataclasses import dataclass, field

from neuronpipe.api.v1.inference_pb2 import GenerateStart, Usage
from neuronpipe.api.v1.stages_pb2 import GenerationFigures
from neuronpipe.api.v1.tasks_pb2 import (
    FinishReason,
    GenerationOptions,
    TaskInput,
    TaskResult,
    TokenLogprob,
)
from neuronpipe.api.v1.tasks_pb2 import (
    GeneratedText as TextMessage,
)
from neuronpipe.core.calls import Call
from neuronpipe.core.errors import Unavailable
from neuronpipe.core.generated import NewTokens, TokenLogprobs
from neuronpipe.core.items import EncodedInput, ExecuteItem, PostprocessItem, Prediction, Stages, Work
from neuronpipe.core.packed import NO_TENSORS, Packed, TensorSets, pack_result
from neuronpipe.core.tensors import Arrays
from neuronpipe.gateway.admission import Admission
from neuronpipe.gateway.inference import GeneratedPart, InferenceRequest, Result
from neuronpipe.gateway.kinds import PlainInput
from neuronpipe.gateway.routing import GatewayModel
from neuronpipe.gateway.settings import PipelineSettings
from neuronpipe.platform.process.background import run_together
from neuronpipe.tasks import TASKS
from neuronpipe.tasks.generated_text import WINDOW_TOKENS
from neuronpipe.tasks.text_generation import (
    GenerationFacts,
    is_drawn,
    logprob_arrays,
    most_generated,
    part_arrays,
    read_logprobs,
    window_arrays,
)

_MORE, _STOP_STRING = FinishReason.FINISH_REASON_UNSPECIFIED, FinishReason.FINISH_REASON_STOP_STRING
# Tokens that are no text yet are decoded again with the next tokens. A long run of them, such as byte tokens, is
# decoded only once it has grown by an eighth. So each token is sent about eight times at most, however long the run is.
_HELD_PER_NEW = 8


class TextParts:
    """The parts of a request's texts between its task and its caller. To a caller who reads slowly, the parts of a text
    that wait are one.
    """

    def __init__(self) -> None:
        self._waiting: list[GenerateStart | GeneratedPart] = []
        self._has_news = asyncio.Event()
        self._is_closed = False

    def put(self, part: GenerateStart | GeneratedPart) -> None:
        """Adds the start of the texts, or a part of a text."""
        self._waiting.append(part)
        self._has_news.set()

    def close(self) -> None:
        """Ends the parts: the request has its result or its error."""
        self._is_closed = True
        self._has_news.set()

    async def take(self) -> list[GenerateStart | GeneratedPart]:
        """Waits for parts, and takes those that wait; none once the parts are closed."""
        while not (self._waiting or self._is_closed):
            self._has_news.clear()
            await self._has_news.wait()
        waiting, self._waiting = self._waiting, []
        return [*_joined(waiting)]


class GeneratedText(PlainInput):
    """A prompt that the model continues token by token, with one text or several."""

    def __init__(
        self,
        request: InferenceRequest,
        call: Call,
        model: GatewayModel,
        settings: PipelineSettings,
        parts: TextParts | None = None,
    ) -> None:
        """`parts`: gets the texts as they come; None for a caller who waits for the result."""
        super().__init__(request, call, model, settings)
        self._interval = settings.stream_interval
        self._parts = parts
        self._runs: list[_TextRun] = []
        options = request.input.body.options
        self.new_tokens = most_generated(options, model.spec)
        self.is_repeatable = not (parts or is_drawn(options, model.spec))

    def note_encoded(self, encoded: EncodedInput) -> None:
        request, call, model = self._request, self._call, self._model
        task = TASKS[model.spec.task]
        assert task.complete  # noqa: S101 (the model generates)
        options = task.complete(request.input.body, model.spec, encoded.tokens)
        self.new_tokens = most_generated(options, model.spec, encoded.tokens)
        self._beams, self._is_search = options.num_beams, options.num_beams > 1
        end_token_ids = frozenset((*GenerationFacts.of(model.spec).end_token_ids, *options.stop_token_ids))
        self._runs = [
            _TextRun(
                call=call,
                model=model,
                input=request.input,
                encoded=encoded,
                options=options,
                number=number,
                # Tokens after a stop string are generated in vain, so each token is looked at.
                interval=1 if options.stop_strings else self._interval,
                end_token_ids=end_token_ids,
                parts=self._parts,
                is_search=self._is_search,
            )
            for number in range(max(1, options.num_return_sequences))
        ]

    async def predict(self, stages: Stages, work: Work, encoded: EncodedInput, admission: Admission) -> Prediction:
        """Generates the tokens of all texts, and puts their text into the parts. The first text that fails ends the
        others. Returns the prediction of the text that took the longest.
        """
        if self._parts:
            name, version = self._model.key
            self._parts.put(
                GenerateStart(
                    model=name,
                    version=str(version),
                    request_id=self._call.request_id,
                    prompt_tokens=encoded.tokens,
                )
            )
        if self._is_search:
            return await self._search(stages, work, admission)
        first, *others = self._runs
        if not others:
            return await first.predict(stages, work, admission)
        # The others begin when the first has begun, so that the prompt is computed once: the executor keeps it.
        following = (run.predict(stages, work, admission, after=first) for run in others)
        predictions = await run_together([first.predict(stages, work, admission), *following])
        longest = max(predictions, key=lambda prediction: prediction.queue_ns + prediction.compute_ns)
        if longest.generation:  # the prompt counts once, so its cached tokens count once
            figures = [prediction.generation for prediction in predictions if prediction.generation]
            longest.generation.cached_tokens = min(one.cached_tokens for one in figures)
        return longest

    async def postprocess(self, stages: Stages, work: Work, encoded: EncodedInput, prediction: Prediction) -> Result:
        """Makes the result, with the text of the last tokens."""
        self.first_token_ns = min((run.first_token_ns for run in self._runs if run.first_token_ns), default=0)
        texts = await run_together(run.postprocess(stages, work) for run in self._runs)
        result = TaskResult()
        getattr(result, self._model.spec.task).sequences.extend(texts)
        return pack_result(result)

    def usage(self, encoded: EncodedInput, prediction: Prediction) -> Usage:
        usage = super().usage(encoded, prediction)
        if figures := prediction.generation:
            usage.generated_tokens = sum(run.generated_tokens for run in self._runs)
            usage.discarded_tokens = sum(run.discarded_tokens for run in self._runs)
            usage.cached_tokens, usage.steps = figures.cached_tokens, figures.steps
        return usage

    async def _search(self, stages: Stages, work: Work, admission: Admission) -> Prediction:
        """Searches all texts at once. The executor tells no tokens before the end of the search."""
        try:
            prediction = await self._runs[0].predict(stages, work, admission)
        except asyncio.CancelledError:
            admission.generated(self.new_tokens)  # the executor may have computed all of them
            raise
        texts = prediction.outputs.arrays
        longest_text = max((len(arrays["token_ids"]) for arrays in texts), default=0)
        admission.generated(longest_text * self._beams)
        del self._runs[max(1, len(texts)) :]  # the search may have found fewer texts
        for run, arrays in zip(self._runs, texts, strict=False):
            run.take(arrays)
        return prediction


@dataclass(slots=True, eq=False, kw_only=True)
class _TextRun:
    """One text of a request. `interval`: the number of tokens that become text together after the first one."""

    call: Call
    model: GatewayModel
    input: Packed[TaskInput]
    encoded: EncodedInput
    options: GenerationOptions
    number: int
    interval: int
    end_token_ids: frozenset[int]
    parts: TextParts | None
    is_search: bool
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)
    first_token_ns: int = 0
    needs_no_turn: bool = False
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    figures: GenerationFigures = field(default_factory=GenerationFigures)
    ended_by: int = 0
    # The executor's arrays about the whole text, as decoding takes them.
    of_whole: Arrays = field(default_factory=dict)
    # The text so far, the number of its tokens, and the number of tokens when they were last decoded.
    text: str = ""
    text_logprobs: list[TokenLogprob] = field(default_factory=list)
    generated_tokens: int = 0
    seen: int = 0
    is_stopped: bool = False

    @property
    def discarded_tokens(self) -> int:
        """The number of tokens that came after the end of the text."""
        return len(self.token_ids) - self.generated_tokens

    async def predict(
        self, stages: Stages, work: Work, admission: Admission, after: "_TextRun | None" = None
    ) -> Prediction:
        """Generates the tokens up to a stop string, and makes text of them as they come, if there are parts.

        `admission`: counts the tokens as they come. `after`: the text that must begin before.
        """
        if after:
            await after.has_begun.wait()
        key, sequences = self.model.key, self.encoded.sequences
        reads_along = bool(self.parts or self.options.stop_strings)
        item = ExecuteItem(self.call, key, sequences, self.options, self.number, is_urgent=reads_along, work=work)
        try:
            async with aclosing(stages.generate(item)) as events:
                async for event in events:
                    if isinstance(event, Prediction):
                        return self._complete(event, admission)
                    self._note(event, admission)
                    if reads_along and self._is_due():
                        await self._decode(stages, work, _MORE)
                    if self.is_stopped:
                        break
            return self._stopped()
        except Exception as error:
            if reads_along and self.seen < len(self.token_ids):
                await self._decode(stages, work, _MORE)
            if isinstance(error, Unavailable) and self.token_ids:
                problem = f"{error.message}, after {len(self.token_ids)} tokens of the text"
                raise Unavailable(problem) from error
            raise
        finally:
            self.has_begun.set()

    def take(self, arrays: Arrays) -> None:
        """Takes the whole text, as the executor has it in the end."""
        self.token_ids = arrays["token_ids"].tolist()
        self.ended_by = int(arrays["finish_reason"])
        self.of_whole = {name: array for name, array in arrays.items() if name == "score" or name.startswith("prompt_")}
        if "logprobs" in arrays:
            self.logprobs = read_logprobs(arrays)

    async def postprocess(self, stages: Stages, work: Work) -> TextMessage:
        """Makes the whole text, with the text of the last tokens."""
        last = TextMessage(finish_reason=_STOP_STRING)
        if not self.is_stopped:
            last = await self._decode(stages, work, self.ended_by)
        whole = TextMessage(text=self.text, finish_reason=last.finish_reason, logprobs=self.text_logprobs)
        whole.token_ids.extend(self.token_ids[: self.generated_tokens])
        whole.prompt_logprobs.extend(last.prompt_logprobs)
        if last.HasField("score"):
            whole.score = last.score
        return whole

    def _note(self, tokens: NewTokens, admission: Admission) -> None:
        # A text that has begun needs no turn: the executor shares its rows among tenants itself.
        needs_no_turn = tokens.is_waiting or bool(tokens.token_ids)
        if needs_no_turn != self.needs_no_turn:
            self.needs_no_turn = needs_no_turn
            if not self.number:  # the other texts begin when the first one has begun
                admission.wait(needs_no_turn)
        if tokens.token_ids:
            self.first_token_ns = self.first_token_ns or time.monotonic_ns()
            self.token_ids.extend(tokens.token_ids)
            self.logprobs.extend(tokens.logprobs)
            self.figures = tokens.figures
            self.has_begun.set()
            admission.generated(len(tokens.token_ids))

    def _is_due(self) -> bool:
        """Whether the tokens that have come are to become text now. The last token of a text becomes text with the
        prediction, which says why the text ends, and comes next.
        """
        ids = self.token_ids
        waits_for = max(self.interval if self.seen else 1, 1 + (self.seen - self.generated_tokens) // _HELD_PER_NEW)
        has_ended = len(ids) == self.options.max_new_tokens or (bool(ids) and ids[-1] in self.end_token_ids)
        return self.seen + waits_for <= len(ids) and not has_ended

    def _complete(self, prediction: Prediction, admission: Admission) -> Prediction:
        self.first_token_ns = self.first_token_ns or time.monotonic_ns()  # a search tells its texts as a whole
        if prediction.outputs:
            known = len(self.token_ids)
            self.take(prediction.outputs.arrays[0])
            if not self.is_search:
                admission.generated(len(self.token_ids) - known)
        return prediction

    def _stopped(self) -> Prediction:
        """Makes a prediction of the figures so far, for a text that ends before its prediction comes."""
        figures = self.figures
        compute_ns = figures.prefill_ns + figures.decode_ns
        return Prediction(NO_TENSORS, queue_ns=figures.queue_ns, compute_ns=compute_ns, generation=figures)

    async def _decode(self, stages: Stages, work: Work, finish_reason: int) -> TextMessage:
        """Makes text of the tokens that are none yet, as far as the text cannot change any more."""
        self.seen, released = len(self.token_ids), self.generated_tokens
        before = self.encoded.annotations.arrays[0]["window"].tolist() + self.token_ids[:released]
        (outputs,) = part_arrays(self.token_ids[released:], finish_reason)
        outputs = {**outputs, **self.of_whole}
        if self.options.HasField("top_logprobs"):
            outputs = {**outputs, **logprob_arrays(self.logprobs[released:])}
        item = PostprocessItem(
            self.call,
            self.model.key,
            self.input,
            TensorSets(arrays=window_arrays(before[-WINDOW_TOKENS:])),
            TensorSets(arrays=[outputs]),
            work=work,
        )
        part: TextMessage = (await stages.postprocess(item)).body.sequences[0]
        self.text += part.text
        self.generated_tokens += len(part.token_ids)
        self.text_logprobs.extend(part.logprobs)
        self.is_stopped = part.finish_reason == _STOP_STRING
        if self.parts and part.token_ids:
            is_last = part.finish_reason != _MORE
            self.parts.put(GeneratedPart(part.text, list(part.token_ids), self.number, list(part.logprobs), is_last))
        return part


def _joined(waiting: Iterable[GenerateStart | GeneratedPart]) -> Iterable[GenerateStart | GeneratedPart]:
    """Yields the start by itself, and all parts of a text together."""
    of_texts: dict[int, list[GeneratedPart]] = {}
    for part in waiting:
        if isinstance(part, GenerateStart):
            yield part
        else:
            of_texts.setdefault(part.sequence, []).append(part)
    for sequence, parts in of_texts.items():
        token_ids = [token_id for part in parts for token_id in part.token_ids]
        logprobs = [logprob for part in parts for logprob in part.logprobs]
        yield GeneratedPart("".join(part.text for part in parts), token_ids, sequence, logprobs, parts[-1].is_last)
