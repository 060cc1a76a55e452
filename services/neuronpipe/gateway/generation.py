"""Prediction and post-processing of a request that generates, side by side: tokens become text as they come.

Post-processing is a pure function of the tokens that are no text yet and of those before them, so each part may be
decoded by another process.
"""

import asyncio
import time
from collections.abc import Callable

from neuronpipe.api.v1.inference_pb2 import GenerateStart
from neuronpipe.api.v1.stages_pb2 import GenerationFigures
from neuronpipe.api.v1.tasks_pb2 import FinishReason, GeneratedText, GenerationOptions, TaskResult, TokenLogprob
from neuronpipe.core.background import run_together
from neuronpipe.core.calls import Call
from neuronpipe.core.errors import Unavailable
from neuronpipe.core.generated import NewTokens, TokenLogprobs
from neuronpipe.core.items import EncodedInput, ExecuteItem, PostprocessItem, Prediction, Stages
from neuronpipe.core.packed import NO_TENSORS, Packed, TensorSets, pack_result
from neuronpipe.core.tensors import Arrays
from neuronpipe.gateway.inference import GeneratedPart, InferenceRequest
from neuronpipe.gateway.routing import GatewayModel
from neuronpipe.tasks import TASKS
from neuronpipe.tasks.generated_text import WINDOW_TOKENS
from neuronpipe.tasks.text_generation import (
    GenerationFacts,
    logprob_arrays,
    most_generated,
    part_arrays,
    read_logprobs,
    window_arrays,
)

_MORE, _STOP_STRING = FinishReason.FINISH_REASON_UNSPECIFIED, FinishReason.FINISH_REASON_STOP_STRING
# Tokens that are no text yet are decoded again with the next ones: of many, as a long run of byte tokens, only once
# there is a new one for so many. So a text sends each token about so many times at most, however long the run is.
_HELD_PER_NEW = 8


class TextRuns:
    """The texts of one request side by side, from its encoded prompt to its result."""

    def __init__(
        self,
        stages: Stages,
        request: InferenceRequest,
        model: GatewayModel,
        encoded: EncodedInput,
        interval: int,
        count: Callable[[int], None],
    ) -> None:
        """`interval`: after the first token, so many become text together. `count`: is told how many tokens were
        generated, as they come.
        """
        self._request = request
        self._start = GenerateStart(
            model=model.key.name,
            version=str(model.key.version),
            request_id=request.call.request_id,
            prompt_tokens=encoded.tokens,
        )
        task = TASKS[model.spec.task]
        assert task.complete  # noqa: S101 (the model generates)
        self._task = task.name
        options = task.complete(getattr(request.input.message, task.name), model.spec, encoded.tokens)
        self._beams, self._is_search = options.num_beams, options.num_beams > 1
        runs = range(max(1, options.num_return_sequences))
        self._count = count
        of_each = None if self._is_search else count
        self._runs = [_TextRun(stages, request, model, encoded, options, number, interval, of_each) for number in runs]
        self.most_tokens = most_generated(options, model.spec, encoded.tokens)

    @property
    def first_token_ns(self) -> int:
        """When the first token was there, on time.monotonic_ns(); 0 until then."""
        return min((one.first_token_ns for one in self._runs if one.first_token_ns), default=0)

    @property
    def generated_tokens(self) -> int:
        """The tokens of the texts."""
        return sum(one.generated_tokens for one in self._runs)

    @property
    def discarded_tokens(self) -> int:
        """The tokens that came after their ends."""
        return sum(one.discarded_tokens for one in self._runs)

    async def predict(self, call: Call) -> Prediction:
        """Generates the tokens, and passes their text to the request's listener. What it took is that of the longest.

        The first text that fails ends the others.
        """
        if self._request.listener:
            self._request.listener(self._start)
        first, *others = self._runs
        try:
            predictions = await run_together(
                # One search finds all its texts.
                [first.predict(call), *(one.predict_after(first, call) for one in others if not self._is_search)]
            )
        except asyncio.CancelledError:
            if self._is_search:  # it tells of no tokens before its end, so it may have computed all of them
                self._count(self.most_tokens)
            raise
        if self._is_search:
            texts = predictions[0].outputs.arrays
            longest_text = max((len(arrays["token_ids"]) for arrays in texts), default=0)
            self._count(longest_text * self._beams)
            del self._runs[max(1, len(texts)) :]  # it may have found fewer
            for run, arrays in zip(self._runs, texts, strict=False):
                run.take(arrays)
        longest = max(predictions, key=lambda one: one.queue_ns + one.compute_ns)
        # The prompt counts once, so what of it was cached does, too.
        figures = [one.generation for one in predictions if one.generation]
        if longest.generation:
            longest.generation.cached_tokens = min(one.cached_tokens for one in figures)
        return longest

    async def postprocess(self, call: Call) -> Packed[TaskResult]:
        """The result, with the text of the last tokens."""
        texts = await run_together(one.postprocess(call) for one in self._runs)
        result = TaskResult()
        getattr(result, self._task).sequences.extend(texts)
        return pack_result(result)


class _TextRun:
    """One text of a request."""

    def __init__(
        self,
        stages: Stages,
        request: InferenceRequest,
        model: GatewayModel,
        encoded: EncodedInput,
        options: GenerationOptions,
        number: int,
        interval: int,
        count: Callable[[int], None] | None,
    ) -> None:
        self._count = count
        self._stages = stages
        self._request = request
        self._model = model
        self._encoded = encoded
        self._number = number
        self._ended_by = 0
        self.options = options
        # What comes after a stop string is generated in vain, so each token is looked at.
        self._interval = 1 if options.stop_strings else interval
        self._end_token_ids = {*GenerationFacts.of(model.spec).end_token_ids, *options.stop_token_ids}
        # On time.monotonic_ns(); 0 until it is there.
        self.first_token_ns = 0
        self._token_ids: list[int] = []
        # What the executor says of the whole text, as decoding takes it.
        self._of_whole: Arrays = {}
        self._logprobs: list[TokenLogprobs] = []
        self._told_logprobs: list[TokenLogprob] = []
        self._figures = GenerationFigures()
        self._has_begun = asyncio.Event()
        self._has_news = asyncio.Event()
        # The text so far, and the number of its tokens.
        self._text = ""
        self._released = 0
        self._is_stopped = False

    @property
    def generated_tokens(self) -> int:
        """The tokens of the text."""
        return self._released

    @property
    def discarded_tokens(self) -> int:
        """The tokens that came after its end."""
        return len(self._token_ids) - self._released

    async def predict_after(self, first: "_TextRun", call: Call) -> Prediction:
        """Begins when another text has begun, so that the prompt is computed once: the executor keeps it."""
        await first._has_begun.wait()
        return await self.predict(call)

    async def predict(self, call: Call) -> Prediction:
        """Generates the tokens, up to a stop string, and passes their text to the request's listener."""
        request = self._request
        sequences, options, number = self._encoded.sequences, self.options, self._number
        item = ExecuteItem(call, self._model.key, sequences, options, self._note, sequence=number)
        executing = asyncio.ensure_future(self._stages.execute(item))
        executing.add_done_callback(lambda _: self._has_news.set())
        executing.add_done_callback(lambda _: self._has_begun.set())
        try:
            if request.listener or self.options.stop_strings:
                await self._read_along(call, executing)
            prediction = await executing if not self._is_stopped else self._stopped()
        except Unavailable as error:
            if not self._token_ids:
                raise
            raise Unavailable(f"{error.message}, after {len(self._token_ids)} tokens of the text") from error
        finally:
            executing.cancel()
            await asyncio.gather(executing, return_exceptions=True)
        self.first_token_ns = self.first_token_ns or time.monotonic_ns()  # of a search the text comes as a whole
        if prediction.outputs:
            self.take(prediction.outputs.arrays[0])
        return prediction

    def take(self, arrays: Arrays) -> None:
        """Takes the whole text, as the executor has it in the end."""
        token_ids = arrays["token_ids"].tolist()
        if self._count:
            self._count(len(token_ids) - len(self._token_ids))
        self._token_ids = token_ids
        self._ended_by = int(arrays["finish_reason"])
        self._of_whole = {
            name: array for name, array in arrays.items() if name == "score" or name.startswith("prompt_")
        }
        if "logprobs" in arrays:
            self._logprobs = read_logprobs(arrays)

    async def postprocess(self, call: Call) -> GeneratedText:
        """The whole text, with that of the last tokens."""
        text = GeneratedText(finish_reason=_STOP_STRING)
        if not self._is_stopped:
            text = await self._decode(call, self._ended_by)
        whole = GeneratedText(text=self._text, finish_reason=text.finish_reason, logprobs=self._told_logprobs)
        whole.token_ids.extend(self._token_ids[: self._released])
        whole.prompt_logprobs.extend(text.prompt_logprobs)
        if text.HasField("score"):
            whole.score = text.score
        return whole

    def _note(self, tokens: NewTokens) -> None:
        self.first_token_ns = self.first_token_ns or time.monotonic_ns()
        self._token_ids.extend(tokens.token_ids)
        if self._count:
            self._count(len(tokens.token_ids))
        self._logprobs.extend(tokens.logprobs)
        self._figures = tokens.figures
        self._has_begun.set()
        self._has_news.set()

    async def _read_along(self, call: Call, executing: "asyncio.Future[Prediction]") -> None:
        """Makes text of tokens as they come, until there are no more, or a stop string is reached."""
        seen = 0
        while not self._is_stopped:
            waits_for = max(self._interval if seen else 1, 1 + (seen - self._released) // _HELD_PER_NEW)
            waits_for = 1 if executing.done() else waits_for
            is_due = seen + waits_for <= len(self._token_ids) and (executing.done() or not self._has_ended())
            if is_due and not _is_complete(executing):
                seen = len(self._token_ids)
                await self._decode(call, _MORE)
            elif executing.done():
                return
            else:
                self._has_news.clear()
                await self._has_news.wait()

    def _has_ended(self) -> bool:
        """Whether the last token ends the text. It becomes text with the prediction, which says why, and comes next."""
        ids = self._token_ids
        return len(ids) == self.options.max_new_tokens or (bool(ids) and ids[-1] in self._end_token_ids)

    async def _decode(self, call: Call, finish_reason: int) -> GeneratedText:
        """The text of the tokens that are none yet, as far as it cannot change any more."""
        before = self._encoded.annotations.arrays[0]["window"].tolist() + self._token_ids[: self._released]
        (outputs,) = part_arrays(self._token_ids[self._released :], finish_reason)
        outputs = {**outputs, **self._of_whole}
        if self.options.HasField("top_logprobs"):
            outputs = {**outputs, **logprob_arrays(self._logprobs[self._released :])}
        item = PostprocessItem(
            call,
            self._model.key,
            self._request.input,
            TensorSets(arrays=window_arrays(before[-WINDOW_TOKENS:])),
            TensorSets(arrays=[outputs]),
        )
        result = await self._stages.postprocess(item)
        part: GeneratedText = getattr(result.message, self._model.spec.task).sequences[0]
        self._text += part.text
        self._released += len(part.token_ids)
        self._told_logprobs.extend(part.logprobs)
        self._is_stopped = part.finish_reason == _STOP_STRING
        if self._request.listener and part.token_ids:
            is_last = part.finish_reason != _MORE
            told = GeneratedPart(part.text, list(part.token_ids), self._number, list(part.logprobs), is_last)
            self._request.listener(told)
        return part

    def _stopped(self) -> Prediction:
        """What is known of a prediction that is not waited for, because the text has ended."""
        figures = self._figures
        compute_ns = figures.prefill_ns + figures.decode_ns
        return Prediction(NO_TENSORS, queue_ns=figures.queue_ns, compute_ns=compute_ns, generation=figures)


def _is_complete(executing: "asyncio.Future[Prediction]") -> bool:
    """Whether the prediction is there, so that post-processing makes text of its last tokens."""
    return executing.done() and not executing.cancelled() and executing.exception() is None
