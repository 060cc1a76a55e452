"""Requests that generate: the texts of one request side by side, whose tokens become text as they come.

Post-processing is a pure function of the tokens that are no text yet and of the tokens before them, so another process
may decode each part.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from neuronpipe.api.v1.inference_pb2 import GenerateStart, Usage
from neuronpipe.api.v1.stages_pb2 import GenerationFigures
from neuronpipe.api.v1.tasks_pb2 import FinishReason, GeneratedText, GenerationOptions, TaskInput, TokenLogprob
from neuronpipe.core.calls import Call
from neuronpipe.core.errors import Unavailable
from neuronpipe.core.generated import NewTokens, TokenLogprobs
from neuronpipe.core.items import (
    DetokenizeItem,
    EncodedInput,
    ExecuteItem,
    ModelKey,
    PostprocessItem,
    Prediction,
    Stages,
    Work,
)
from neuronpipe.core.packed import NO_TENSORS, Packed, TensorSets, pack_texts
from neuronpipe.core.tensors import Arrays
from neuronpipe.gateway.admission import Admission
from neuronpipe.gateway.requests import GeneratedPart, Result, TextParts
from neuronpipe.gateway.running import RunningRequest
from neuronpipe.platform.process.background import end_tasks, run_together
from neuronpipe.tasks import TASKS
from neuronpipe.tasks.generated_text import WINDOW_TOKENS
from neuronpipe.tasks.text_generation import logprob_arrays, part_arrays, read_logprobs, window_arrays
from neuronpipe.tasks.text_options import GenerationFacts, is_drawn, most_generated

_MORE, _STOP_STRING = FinishReason.FINISH_REASON_UNSPECIFIED, FinishReason.FINISH_REASON_STOP_STRING
# Tokens that are no text yet are decoded again with the next tokens. A long run of them, such as byte tokens, is
# decoded only once it has grown by an eighth. So each token is sent about eight times at most, however long the run is.
_UNDECODED_PER_NEW = 8


@dataclass(frozen=True, slots=True)
class TextPlan:
    """The tokenized prompt of a request, the stages, and the rules by which its texts are made.

    - `options`: the options of generation, with every field set.
    - `interval`: the number of tokens that become text together after the first token.
    - `is_search`: whether a beam search finds the texts; the executor sends no tokens before its end.
    - `reads_along`: whether tokens become text as they come.
    - `parts`: gets the texts as they come; None for a caller who waits for the result.
    """

    call: Call
    model: ModelKey
    input: Packed[TaskInput]
    stages: Stages
    parts: TextParts | None
    encoded: EncodedInput
    options: GenerationOptions
    end_token_ids: frozenset[int]
    interval: int
    is_search: bool
    reads_along: bool


class GenerationRequest(RunningRequest):
    """A prompt that the model continues token by token, with one text or several."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._new_tokens = most_generated(self.request.input.body.options, self.model.spec)
        # There are no texts before `plan` makes them: it needs the tokens of the prompt.
        self._texts: Sequence[_RunningText] = ()

    @property
    def is_repeatable(self) -> bool:
        return not (self.parts or is_drawn(self.request.input.body.options, self.model.spec))

    @property
    def new_tokens(self) -> int:
        return self._new_tokens

    @property
    def first_token_ns(self) -> int:
        return min((text.tokens.first_token_ns for text in self._texts if text.tokens.first_token_ns), default=0)

    def plan(self, admission: Admission, encoded: EncodedInput) -> None:
        plan = self._text_plan(encoded)
        self._new_tokens = most_generated(plan.options, self.model.spec, encoded.tokens)
        numbers = range(max(1, plan.options.num_return_sequences))
        self._texts = [_RunningText(plan, _GeneratedTokens(number, admission)) for number in numbers]

    def _text_plan(self, encoded: EncodedInput) -> TextPlan:
        """Completes the options of generation, and makes rules of them. Raises InvalidInput."""
        spec = self.model.spec
        generation = TASKS[spec.task].generation
        assert generation  # noqa: S101 (the model generates)
        options = generation.complete(self.request.input.body, spec, encoded.tokens)
        return TextPlan(
            call=self.call,
            model=self.model.key,
            input=self.request.input,
            stages=self.pipeline.stages,
            parts=self.parts,
            encoded=encoded,
            options=options,
            end_token_ids=frozenset((*GenerationFacts.of(spec).end_token_ids, *options.stop_token_ids)),
            # Tokens after a stop string are generated in vain, so each token is looked at.
            interval=1 if options.stop_strings else self.pipeline.settings.stream_interval,
            is_search=options.num_beams > 1,
            reads_along=bool(self.parts or options.stop_strings),
        )

    async def execute(self, admission: Admission, work: Work, encoded: EncodedInput) -> Prediction:
        """Generates the tokens of all texts, and puts their text into the parts. The first text that fails ends the
        others. Returns the prediction of the text that took the longest.
        """
        if self.parts:
            (name, version), request_id = self.model.key, self.call.request_id
            self.parts.put(
                GenerateStart(model=name, version=str(version), request_id=request_id, prompt_tokens=encoded.tokens)
            )
        admission.queue()
        first, *others = self._texts
        if first.plan.is_search:
            return await self._search(first, work)
        if not others:
            return await first.generate(work)
        # The others begin when the first has begun, so that the prompt is computed once: the executor keeps it.
        following = (text.generate(work, after=first) for text in others)
        predictions = await run_together([first.generate(work), *following])
        longest = max(predictions, key=lambda prediction: prediction.queue_ns + prediction.compute_ns)
        if longest.generation:  # the prompt counts once, so its cached tokens count once
            cached_tokens = [prediction.generation.cached_tokens for prediction in predictions if prediction.generation]
            longest.generation.cached_tokens = min(cached_tokens)
        return longest

    async def postprocess(self, work: Work, encoded: EncodedInput, prediction: Prediction) -> Result:
        """Makes the result, with the text of the last tokens."""
        texts = await run_together(text.finish(work) for text in self._texts)
        return pack_texts(self.model.spec.task, texts)

    def usage(self, encoded: EncodedInput, prediction: Prediction) -> Usage:
        usage = super().usage(encoded, prediction)
        if figures := prediction.generation:
            usage.generated_tokens = sum(text.decoded_tokens for text in self._texts)
            # Tokens that came after the end of their text.
            usage.discarded_tokens = sum(len(text.tokens.token_ids) - text.decoded_tokens for text in self._texts)
            usage.cached_tokens, usage.steps = figures.cached_tokens, figures.steps
        return usage

    async def _search(self, first: "_RunningText", work: Work) -> Prediction:
        """Runs a beam search. The generation of the first text makes all texts."""
        try:
            prediction = await first.generate(work)
        except asyncio.CancelledError:
            first.tokens.admission.charge(self.new_tokens)  # the executor may have computed all of them
            raise
        array_sets = prediction.outputs.arrays
        longest = max((len(arrays["token_ids"]) for arrays in array_sets), default=0)
        first.tokens.admission.charge(longest * first.plan.options.num_beams)
        self._texts = self._texts[: max(1, len(array_sets))]  # the search may have found fewer texts
        for text, arrays in zip(self._texts, array_sets, strict=False):
            text.tokens.take_whole(arrays)
        return prediction


@dataclass(slots=True, eq=False)
class _GeneratedTokens:
    """The tokens of one text, as far as the executor has generated them.

    - `number`: the number of the text in its request.
    - `figures`: the executor's figures of the text so far.
    - `final_arrays`: the executor's arrays about the whole text, as decoding takes them.
    """

    number: int
    admission: Admission
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)
    needs_no_turn: bool = False
    first_token_ns: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    figures: GenerationFigures = field(default_factory=GenerationFigures)
    finish_reason: int = 0
    final_arrays: Arrays = field(default_factory=dict)

    def note(self, tokens: NewTokens) -> None:
        """Adds the tokens of a step."""
        # A text that has begun needs no turn: the executor shares its rows among tenants itself.
        needs_no_turn = tokens.is_waiting or bool(tokens.token_ids)
        if needs_no_turn != self.needs_no_turn:
            self.needs_no_turn = needs_no_turn
            if not self.number:  # the other texts begin when the first has begun
                self.admission.pause(is_paused=needs_no_turn)
        if tokens.token_ids:
            self.first_token_ns = self.first_token_ns or time.monotonic_ns()
            self.token_ids.extend(tokens.token_ids)
            self.logprobs.extend(tokens.logprobs)
            self.figures = tokens.figures
            self.has_begun.set()
            self.admission.charge(len(tokens.token_ids))

    def complete(self, prediction: Prediction, *, is_search: bool) -> Prediction:
        """Takes the prediction of the text. The caller counts the tokens of a search."""
        self.first_token_ns = self.first_token_ns or time.monotonic_ns()  # a search tells its texts as a whole
        if prediction.outputs:
            tokens_before = len(self.token_ids)
            self.take_whole(prediction.outputs.arrays[0])
            if not is_search:
                self.admission.charge(len(self.token_ids) - tokens_before)
        return prediction

    def take_whole(self, arrays: Arrays) -> None:
        """Takes the whole text, as the executor has it in the end."""
        self.token_ids = arrays["token_ids"].tolist()
        self.finish_reason = int(arrays["finish_reason"])
        self.final_arrays = {
            name: array for name, array in arrays.items() if name == "score" or name.startswith("prompt_")
        }
        if "logprobs" in arrays:
            self.logprobs = read_logprobs(arrays)


@dataclass(slots=True, eq=False)
class _RunningText:
    """One text of a request, as far as its tokens have become text. It is the TokenSink of the executor.

    - `decoded_tokens`: the number of tokens that are in `text`.
    - `seen_tokens`: the number of tokens that had come when tokens were last decoded.
    - `is_decoding`: whether `generate` waits for the text of tokens.
    - `stop_string`: the stop string that has ended the text.
    """

    plan: TextPlan
    tokens: _GeneratedTokens
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    decoded_tokens: int = 0
    seen_tokens: int = 0
    is_decoding: bool = False
    stop_string: str = ""
    has_news: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(self, work: Work, after: "_RunningText | None" = None) -> Prediction:
        """Generates the tokens up to a stop string, and makes text of them as they come, if the request reads along.

        `after`: the text that must begin before.
        """
        if after:
            await after.tokens.has_begun.wait()
        plan, tokens = self.plan, self.tokens
        item = ExecuteItem(plan.call, plan.model, plan.encoded.sequences, plan.options, tokens.number, work=work)
        generating = asyncio.ensure_future(plan.stages.execute(item, self))
        generating.add_done_callback(lambda _: self.has_news.set())
        try:
            while not generating.done():
                await self.has_news.wait()
                self.has_news.clear()
                if self._is_due() and not self._decode_at_once():
                    await self._decode(work, _MORE)
                if self.stop_string:
                    # The figures so far, as the text ends before its prediction comes.
                    figures = tokens.figures
                    compute_ns = figures.prefill_ns + figures.decode_ns
                    return Prediction(NO_TENSORS, figures.queue_ns, compute_ns, generation=figures)
            return tokens.complete(await generating, is_search=plan.is_search)
        except Exception as error:
            if plan.reads_along and self.seen_tokens < len(tokens.token_ids):
                await self._decode(work, _MORE)
            if isinstance(error, Unavailable) and tokens.token_ids:
                problem = f"{error.message}, after {len(tokens.token_ids)} tokens of the text"
                raise Unavailable(problem) from error
            raise
        finally:
            tokens.has_begun.set()
            await end_tasks([generating])
            del generating  # an error keeps this frame

    def put(self, tokens: NewTokens) -> None:
        """Notes the tokens of a step. If they are due, they become text now, or else `generate` makes text of them."""
        self.tokens.note(tokens)
        is_late = self._is_due() and (self.is_decoding or not self._decode_at_once())
        if is_late or self.stop_string:
            self.has_news.set()

    async def finish(self, work: Work) -> GeneratedText:
        """Makes the whole text, with the text of the last tokens."""
        last = GeneratedText(finish_reason=_STOP_STRING)
        if not self.stop_string:
            last = await self._decode(work, self.tokens.finish_reason)
        whole = GeneratedText(text=self.text, finish_reason=last.finish_reason, logprobs=self.logprobs)
        whole.stop_string = self.stop_string
        whole.token_ids.extend(self.tokens.token_ids[: self.decoded_tokens])
        whole.prompt_logprobs.extend(last.prompt_logprobs)
        if last.HasField("score"):
            whole.score = last.score
        return whole

    def _is_due(self) -> bool:
        """Returns whether the tokens that have come are to become text now. The last token of a text becomes text with
        the prediction, which says why the text ends, and comes next.
        """
        ids, plan, seen = self.tokens.token_ids, self.plan, self.seen_tokens
        if not plan.reads_along or self.stop_string:
            return False
        waits_for = max(plan.interval if seen else 1, 1 + (seen - self.decoded_tokens) // _UNDECODED_PER_NEW)
        has_ended = len(ids) == plan.options.max_new_tokens or (bool(ids) and ids[-1] in plan.end_token_ids)
        return seen + waits_for <= len(ids) and not has_ended

    def _decode_at_once(self) -> bool:
        """Makes text of new tokens if this process has the stage, and the stage is free. Returns whether it has."""
        plan, ids = self.plan, self.tokens.token_ids
        if plan.stages.detokenize is None:
            return False
        item = DetokenizeItem(plan.model, plan.options, self._window(), ids[self.decoded_tokens :])
        try:
            released = plan.stages.detokenize(item)
        except Exception:  # the caller of `put` is the executor; `_decode` meets the error again
            return False
        if released is None:
            return False
        self.seen_tokens = len(ids)
        self._add(released.text, released.tokens, released.stop_string, is_last=released.is_stopped)
        return True

    async def _decode(self, work: Work, finish_reason: int) -> GeneratedText:
        """Makes text of the tokens that are not text yet, except the end of the text if later tokens may change it."""
        plan, tokens, decoded = self.plan, self.tokens, self.decoded_tokens
        self.seen_tokens = len(tokens.token_ids)
        (outputs,) = part_arrays(tokens.token_ids[decoded:], finish_reason)
        outputs = {**outputs, **tokens.final_arrays}
        if plan.options.HasField("top_logprobs"):
            outputs = {**outputs, **logprob_arrays(tokens.logprobs[decoded:])}
        annotations = TensorSets(arrays=window_arrays(self._window()))
        item = PostprocessItem(plan.call, plan.model, plan.input, annotations, TensorSets(arrays=[outputs]), work=work)
        self.is_decoding = True
        try:
            part: GeneratedText = (await plan.stages.postprocess(item)).body.sequences[0]
        finally:
            self.is_decoding = False
        self._add(part.text, len(part.token_ids), part.stop_string, part.logprobs, is_last=part.finish_reason != _MORE)
        return part

    def _window(self) -> list[int]:
        """Returns the tokens before those that are not text yet, if needed from the prompt."""
        decoded = self.decoded_tokens
        window = self.tokens.token_ids[max(0, decoded - WINDOW_TOKENS) : decoded]
        if len(window) < WINDOW_TOKENS:
            of_prompt = self.plan.encoded.annotations.arrays[0]["window"].tolist()
            window = [*of_prompt, *window][-WINDOW_TOKENS:]
        return window

    def _add(
        self, text: str, tokens: int, stop_string: str, logprobs: Sequence[TokenLogprob] = (), *, is_last: bool
    ) -> None:
        token_ids = self.tokens.token_ids[self.decoded_tokens : self.decoded_tokens + tokens]
        self.text += text
        self.decoded_tokens += tokens
        self.logprobs.extend(logprobs)
        self.stop_string = stop_string
        if self.plan.parts and tokens:
            self.plan.parts.put(GeneratedPart(text, token_ids, self.tokens.number, list(logprobs), is_last))
