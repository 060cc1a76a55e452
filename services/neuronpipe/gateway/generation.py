"""Requests that generate: the texts of one request side by side, whose tokens become text as they come.

Post-processing is a pure function of the tokens that are no text yet and of the tokens before them, so another process
may decode each part.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from neuronpipe.api.v1.inference_pb2 import GenerateStart, Usage
from neuronpipe.api.v1.stages_pb2 import GenerationFigures
from neuronpipe.api.v1.tasks_pb2 import FinishReason, GeneratedText, GenerationOptions, TokenLogprob
from neuronpipe.core.errors import Unavailable
from neuronpipe.core.generated import NewTokens, TokenLogprobs
from neuronpipe.core.items import EncodedInput, ExecuteItem, PostprocessItem, Prediction, Work
from neuronpipe.core.packed import NO_TENSORS, TensorSets, pack_texts
from neuronpipe.core.tensors import Arrays
from neuronpipe.gateway.admission import Admission
from neuronpipe.gateway.requests import GeneratedPart, Result
from neuronpipe.gateway.running import RunningRequest
from neuronpipe.platform.process.background import run_together
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
    """The tokenized prompt of a request, and the rules by which its texts are made.

    - `options`: the options of generation, with every field set.
    - `interval`: the number of tokens that become text together after the first token.
    - `is_search`: whether a beam search finds the texts; the executor sends no tokens before its end.
    - `reads_along`: whether tokens become text as they come.
    """

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
        return min((text.first_token_ns for text in self._texts if text.first_token_ns), default=0)

    def plan(self, admission: Admission, encoded: EncodedInput) -> None:
        plan = self._text_plan(encoded)
        self._new_tokens = most_generated(plan.options, self.model.spec, encoded.tokens)
        numbers = range(max(1, plan.options.num_return_sequences))
        self._texts = [_RunningText(number, plan, admission) for number in numbers]

    def _text_plan(self, encoded: EncodedInput) -> TextPlan:
        """Completes the options of generation, and makes rules of them. Raises InvalidInput."""
        spec = self.model.spec
        generation = TASKS[spec.task].generation
        assert generation  # noqa: S101 (the model generates)
        options = generation.complete(self.request.input.body, spec, encoded.tokens)
        return TextPlan(
            encoded,
            options,
            frozenset((*GenerationFacts.of(spec).end_token_ids, *options.stop_token_ids)),
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
            return await first.generate(self, work)
        # The others begin when the first has begun, so that the prompt is computed once: the executor keeps it.
        following = (text.generate(self, work, after=first) for text in others)
        predictions = await run_together([first.generate(self, work), *following])
        longest = max(predictions, key=lambda prediction: prediction.queue_ns + prediction.compute_ns)
        if longest.generation:  # the prompt counts once, so its cached tokens count once
            cached_tokens = [prediction.generation.cached_tokens for prediction in predictions if prediction.generation]
            longest.generation.cached_tokens = min(cached_tokens)
        return longest

    async def postprocess(self, work: Work, encoded: EncodedInput, prediction: Prediction) -> Result:
        """Makes the result, with the text of the last tokens."""
        texts = await run_together(text.finish(self, work) for text in self._texts)
        return pack_texts(self.model.spec.task, texts)

    def usage(self, encoded: EncodedInput, prediction: Prediction) -> Usage:
        usage = super().usage(encoded, prediction)
        if figures := prediction.generation:
            usage.generated_tokens = sum(text.decoded_tokens for text in self._texts)
            # Tokens that came after the end of their text.
            usage.discarded_tokens = sum(len(text.token_ids) - text.decoded_tokens for text in self._texts)
            usage.cached_tokens, usage.steps = figures.cached_tokens, figures.steps
        return usage

    async def _search(self, first: "_RunningText", work: Work) -> Prediction:
        """Searches all texts at once, as the generation of the first text."""
        try:
            prediction = await first.generate(self, work)
        except asyncio.CancelledError:
            first.admission.charge(self.new_tokens)  # the executor may have computed all of them
            raise
        array_sets = prediction.outputs.arrays
        longest = max((len(arrays["token_ids"]) for arrays in array_sets), default=0)
        first.admission.charge(longest * first.plan.options.num_beams)
        self._texts = self._texts[: max(1, len(array_sets))]  # the search may have found fewer texts
        for text, arrays in zip(self._texts, array_sets, strict=False):
            text.take_whole(arrays)
        return prediction


@dataclass(slots=True, eq=False)
class _RunningText:
    """One text of a request. The methods get the request as an argument, because a field with the request would make a
    cycle.

    - `final_arrays`: the executor's arrays about the whole text, as decoding takes them.
    - `text`: the text so far.
    - `decoded_tokens`: the number of tokens that are in `text`.
    - `seen_tokens`: the number of tokens that had come when tokens were last decoded.
    - `is_stopped`, `stop_string`: whether a stop string has ended the text, and which.
    """

    number: int
    plan: TextPlan
    admission: Admission
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)
    needs_no_turn: bool = False
    first_token_ns: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    figures: GenerationFigures = field(default_factory=GenerationFigures)
    finish_reason: int = 0
    final_arrays: Arrays = field(default_factory=dict)
    text: str = ""
    text_logprobs: list[TokenLogprob] = field(default_factory=list)
    decoded_tokens: int = 0
    seen_tokens: int = 0
    is_stopped: bool = False
    stop_string: str = ""

    async def generate(self, request: GenerationRequest, work: Work, after: "_RunningText | None" = None) -> Prediction:
        """Generates the tokens up to a stop string, and makes text of them as they come, if the request reads along.

        `after`: the text that must begin before.
        """
        if after:
            await after.has_begun.wait()
        plan, call, key = self.plan, request.call, request.model.key
        item = ExecuteItem(
            call, key, plan.encoded.sequences, plan.options, self.number, is_urgent=plan.reads_along, work=work
        )
        try:
            async with aclosing(request.pipeline.stages.generate(item)) as events:
                async for event in events:
                    if isinstance(event, Prediction):
                        return self._complete(event)
                    self._note(event)
                    if plan.reads_along and self._is_due():
                        await self._decode(request, work, _MORE)
                    if self.is_stopped:
                        break
            # The figures so far, as the text ends before its prediction comes.
            figures = self.figures
            compute_ns = figures.prefill_ns + figures.decode_ns
            return Prediction(NO_TENSORS, queue_ns=figures.queue_ns, compute_ns=compute_ns, generation=figures)
        except Exception as error:
            if plan.reads_along and self.seen_tokens < len(self.token_ids):
                await self._decode(request, work, _MORE)
            if isinstance(error, Unavailable) and self.token_ids:
                problem = f"{error.message}, after {len(self.token_ids)} tokens of the text"
                raise Unavailable(problem) from error
            raise
        finally:
            self.has_begun.set()

    def take_whole(self, arrays: Arrays) -> None:
        """Takes the whole text, as the executor has it in the end."""
        self.token_ids = arrays["token_ids"].tolist()
        self.finish_reason = int(arrays["finish_reason"])
        self.final_arrays = {
            name: array for name, array in arrays.items() if name == "score" or name.startswith("prompt_")
        }
        if "logprobs" in arrays:
            self.logprobs = read_logprobs(arrays)

    async def finish(self, request: GenerationRequest, work: Work) -> GeneratedText:
        """Makes the whole text, with the text of the last tokens."""
        last = GeneratedText(finish_reason=_STOP_STRING)
        if not self.is_stopped:
            last = await self._decode(request, work, self.finish_reason)
        whole = GeneratedText(text=self.text, finish_reason=last.finish_reason, logprobs=self.text_logprobs)
        whole.stop_string = self.stop_string
        whole.token_ids.extend(self.token_ids[: self.decoded_tokens])
        whole.prompt_logprobs.extend(last.prompt_logprobs)
        if last.HasField("score"):
            whole.score = last.score
        return whole

    def _note(self, tokens: NewTokens) -> None:
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

    def _is_due(self) -> bool:
        """Returns whether the tokens that have come are to become text now. The last token of a text becomes text with
        the prediction, which says why the text ends, and comes next.
        """
        ids, plan = self.token_ids, self.plan
        undecoded = self.seen_tokens - self.decoded_tokens
        waits_for = max(plan.interval if self.seen_tokens else 1, 1 + undecoded // _UNDECODED_PER_NEW)
        has_ended = len(ids) == plan.options.max_new_tokens or (bool(ids) and ids[-1] in plan.end_token_ids)
        return self.seen_tokens + waits_for <= len(ids) and not has_ended

    def _complete(self, prediction: Prediction) -> Prediction:
        self.first_token_ns = self.first_token_ns or time.monotonic_ns()  # a search tells its texts as a whole
        if prediction.outputs:
            tokens_before = len(self.token_ids)
            self.take_whole(prediction.outputs.arrays[0])
            if not self.plan.is_search:
                self.admission.charge(len(self.token_ids) - tokens_before)
        return prediction

    async def _decode(self, request: GenerationRequest, work: Work, finish_reason: int) -> GeneratedText:
        """Makes text of the tokens that are not text yet, except the end of the text if later tokens may change it."""
        self.seen_tokens, decoded = len(self.token_ids), self.decoded_tokens
        before = self.token_ids[max(0, decoded - WINDOW_TOKENS) : decoded]
        if len(before) < WINDOW_TOKENS:
            of_prompt = self.plan.encoded.annotations.arrays[0]["window"].tolist()
            before = [*of_prompt, *before][-WINDOW_TOKENS:]
        (outputs,) = part_arrays(self.token_ids[decoded:], finish_reason)
        outputs = {**outputs, **self.final_arrays}
        if self.plan.options.HasField("top_logprobs"):
            outputs = {**outputs, **logprob_arrays(self.logprobs[decoded:])}
        item = PostprocessItem(
            request.call,
            request.model.key,
            request.request.input,
            TensorSets(arrays=window_arrays(before)),
            TensorSets(arrays=[outputs]),
            work=work,
        )
        part: GeneratedText = (await request.pipeline.stages.postprocess(item)).body.sequences[0]
        self.text += part.text
        self.decoded_tokens += len(part.token_ids)
        self.text_logprobs.extend(part.logprobs)
        self.is_stopped, self.stop_string = part.finish_reason == _STOP_STRING, part.stop_string
        if request.parts and part.token_ids:
            is_last, token_ids = part.finish_reason != _MORE, list(part.token_ids)
            request.parts.put(GeneratedPart(part.text, token_ids, self.number, list(part.logprobs), is_last))
        return part
