"""Prediction and post-processing of a request that generates, side by side: tokens become text as they come.

Post-processing is a pure function of the tokens that are no text yet and of those before them, so each part may be
decoded by another process.
"""

import asyncio
import time

from neuronpipe.api.v1.tasks_pb2 import FinishReason, GeneratedText, TaskResult
from neuronpipe.core.calls import Call
from neuronpipe.core.errors import Unavailable
from neuronpipe.core.items import (
    EncodedInput,
    ExecuteItem,
    GenerationFigures,
    NewTokens,
    PostprocessItem,
    Prediction,
    Stages,
)
from neuronpipe.core.packed import NO_TENSORS, Packed, TensorSets, pack_result
from neuronpipe.gateway.inference import GeneratedPart, GenerationStart, InferenceRequest
from neuronpipe.gateway.models import GatewayModel
from neuronpipe.tasks import TASKS
from neuronpipe.tasks.generated_text import WINDOW_TOKENS
from neuronpipe.tasks.text_generation import part_arrays, window_arrays

_MORE, _STOP_STRING = FinishReason.FINISH_REASON_UNSPECIFIED, FinishReason.FINISH_REASON_STOP_STRING


class TextRun:
    """The text of one request, from its encoded prompt to its result."""

    def __init__(self, stages: Stages, request: InferenceRequest, model: GatewayModel, encoded: EncodedInput) -> None:
        self._stages = stages
        self._request = request
        self._model = model
        self._encoded = encoded
        task = TASKS[model.spec.task]
        assert task.complete  # noqa: S101 (the model generates)
        self._task = task.name
        self.options = task.complete(getattr(request.input.message, task.name), model.spec, encoded.tokens)
        # On time.monotonic_ns(); 0 until it is there.
        self.first_token_ns = 0
        self._token_ids: list[int] = []
        self._figures = GenerationFigures()
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

    async def predict(self, call: Call) -> Prediction:
        """Generates the tokens, up to a stop string, and passes their text to the request's listener."""
        request = self._request
        if request.listener:
            request.listener(GenerationStart(self._model.key, self._encoded.tokens))
        item = ExecuteItem(call, self._model.key, self._encoded.sequences, self.options, self._note)
        executing = asyncio.ensure_future(self._stages.execute(item))
        executing.add_done_callback(lambda _: self._has_news.set())
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
            self._token_ids = prediction.outputs.arrays[0]["token_ids"].tolist()
        return prediction

    async def postprocess(self, call: Call, prediction: Prediction) -> Packed[TaskResult]:
        """The result, with the text of the last tokens."""
        reason = _STOP_STRING
        if not self._is_stopped:
            ended_by = int(prediction.outputs.arrays[0]["finish_reason"])
            reason = (await self._decode(call, ended_by)).finish_reason
        ids = self._token_ids[: self._released]
        text = GeneratedText(text=self._text, token_ids=ids, finish_reason=reason)
        result = TaskResult()
        getattr(result, self._task).sequences.append(text)
        return pack_result(result)

    def _note(self, tokens: NewTokens) -> None:
        self.first_token_ns = self.first_token_ns or time.monotonic_ns()
        self._token_ids.extend(tokens.token_ids)
        self._figures = tokens.figures
        self._has_news.set()

    async def _read_along(self, call: Call, executing: "asyncio.Future[Prediction]") -> None:
        """Makes text of tokens as they come, until there are no more, or a stop string is reached."""
        seen = 0
        while not self._is_stopped:
            if seen < len(self._token_ids) and not _is_complete(executing):
                seen = len(self._token_ids)
                await self._decode(call, _MORE)
            elif executing.done():
                return
            else:
                self._has_news.clear()
                await self._has_news.wait()

    async def _decode(self, call: Call, finish_reason: int) -> GeneratedText:
        """The text of the tokens that are none yet, as far as it cannot change any more."""
        before = self._encoded.annotations.arrays[0]["window"].tolist() + self._token_ids[: self._released]
        item = PostprocessItem(
            call,
            self._model.key,
            self._request.input,
            TensorSets(arrays=window_arrays(before[-WINDOW_TOKENS:])),
            TensorSets(arrays=part_arrays(self._token_ids[self._released :], finish_reason)),
        )
        result = await self._stages.postprocess(item)
        part: GeneratedText = getattr(result.message, self._task).sequences[0]
        self._text += part.text
        self._released += len(part.token_ids)
        self._is_stopped = part.finish_reason == _STOP_STRING
        if self._request.listener and part.token_ids:
            self._request.listener(GeneratedPart(part.text, list(part.token_ids)))
        return part

    def _stopped(self) -> Prediction:
        """What is known of a prediction that is not waited for, because the text has ended."""
        figures = self._figures
        compute_ns = figures.prefill_ns + figures.decode_ns
        return Prediction(NO_TENSORS, queue_ns=figures.queue_ns, compute_ns=compute_ns, generation=figures)


def _is_complete(executing: "asyncio.Future[Prediction]") -> bool:
    """Whether the prediction is there, so that post-processing makes text of its last tokens."""
    return executing.done() and not executing.cancelled() and executing.exception() is None
