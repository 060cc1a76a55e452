"""One generating model of the executor: takes items, and runs its steps one after the other in a thread of its own."""

import asyncio
import itertools
import time
from collections.abc import Mapping

import numpy as np

from neuronpipe.api.v1.tasks_pb2 import FinishReason
from neuronpipe.core.calls import Call
from neuronpipe.core.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidInput,
    NeuronpipeError,
    Overloaded,
    Unavailable,
)
from neuronpipe.core.items import ExecuteItem, NewTokens, Prediction
from neuronpipe.core.logs import log_fault
from neuronpipe.core.metrics import Telemetry
from neuronpipe.core.model import ModelSpec
from neuronpipe.core.packed import TensorSets
from neuronpipe.inputs.kind import input_kind
from neuronpipe.neuron_executor.generation.blocks import BlockPool
from neuronpipe.neuron_executor.generation.observer import GenerationObserver
from neuronpipe.neuron_executor.generation.planner import Planner, Sequence
from neuronpipe.neuron_executor.generation.sampling import NotFinite, TokenChooser, token_logprobs
from neuronpipe.runtimes.cpus import compute_pool
from neuronpipe.runtimes.decoder import DecoderModel, Run
from neuronpipe.tasks.text_generation import GenerationFacts, check_options

# The shortest retry delay of a refused caller.
_MIN_RETRY_AFTER_S = 0.05
_END, _LENGTH = FinishReason.FINISH_REASON_END, FinishReason.FINISH_REASON_LENGTH


class Generator:
    """Generates texts with one model. Its owner runs `work`, and closes it."""

    def __init__(
        self,
        model: DecoderModel,
        spec: ModelSpec,
        telemetry: Telemetry,
        observer: GenerationObserver,
        *,
        max_sequences: int,
        step_tokens: int,
        max_queue_sequences: int,
    ) -> None:
        self.spec = spec
        self.planner = Planner(BlockPool(model.blocks, model.block_tokens), max_sequences, step_tokens)
        self._model = model
        self._kind = input_kind(spec)
        self._tracer = telemetry.tracer
        self._observer = observer
        self._max_queue_sequences = max_queue_sequences
        self._end_token_ids = frozenset(GenerationFacts.of(spec).end_token_ids)
        self._numbers = itertools.count()
        self._has_work = asyncio.Event()
        self._thread = compute_pool(1, f"generate-{spec.name}")
        self._is_closed = False
        observer.watch(
            running=lambda: len(self.planner.running),
            waiting=lambda: len(self.planner.waiting),
            blocks=lambda: self.planner.blocks_in_use / model.blocks,
        )

    async def generate(self, item: ExecuteItem) -> Prediction:
        """Generates the text of one item, and reports its tokens as they come.

        Raises InvalidInput, Overloaded, DeadlineExceeded, Unavailable and InternalError. If it is cancelled, the next
        step is without the sequence.
        """
        trace = self._tracer.joined(item.call.trace)
        sequence = self._sequence_of(item)
        self._check_room(sequence)
        self.planner.add(sequence)
        self._has_work.set()
        try:
            finish_reason = await sequence.future
        except BaseException as error:
            self._observer.failed(sequence, trace, error)
            raise
        finally:
            self._has_work.set()  # if it was cancelled, the next plan frees its blocks
        self._observer.finished(sequence, trace)
        outputs = {
            "token_ids": np.array(sequence.token_ids[sequence.prompt_tokens :], np.int32),
            "finish_reason": np.array(finish_reason, np.int32),
        }
        figures = sequence.figures
        return Prediction(
            TensorSets(arrays=[outputs]),
            queue_ns=figures.queue_ns,
            compute_ns=figures.prefill_ns + figures.decode_ns,
            generation=figures,
        )

    async def work(self) -> None:
        """Runs steps as long as there are sequences, until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            self._sweep()
            planned = self.planner.plan()
            if not planned:
                self._has_work.clear()
                await self._has_work.wait()
                continue
            began_ns = time.monotonic_ns()
            for sequence in planned:
                sequence.started_ns = sequence.started_ns or began_ns
            try:
                chosen = await loop.run_in_executor(self._thread, self._step, planned)
            except Exception as fault:
                log_fault("a step could not be computed", fault, model=self.spec.name, sequences=len(planned))
                for sequence in planned:
                    self._fail(sequence, InternalError("the model could not compute this input"))
                continue
            self._apply(planned, chosen, began_ns)

    async def close(self) -> None:
        """Ends all sequences, and waits for the step that runs."""
        self._is_closed = True
        for sequence in list(self.planner):
            if not sequence.future.done():
                sequence.future.set_exception(_stopping())
        await asyncio.to_thread(self._thread.shutdown, wait=True, cancel_futures=True)
        self._observer.unwatch()

    def _sequence_of(self, item: ExecuteItem) -> Sequence:
        if item.options is None or len(item.sequences) != 1:
            raise InvalidInput("input", f"model {self.spec.name!r} generates; it takes one prompt with its options")
        (arrays,) = item.sequences.arrays
        self._kind.check(arrays)
        check_options(item.options, self.spec)
        token_ids = arrays["input_ids"].tolist()
        ends = self._end_token_ids | frozenset(item.options.stop_token_ids)
        return Sequence(
            (item.call.is_bulk, item.call.is_beyond_share, next(self._numbers)),
            token_ids,
            item.options,
            TokenChooser(item.options, len(token_ids), ends),
            ends,
            _deadline_s(item.call),
            item.call.caller.cache_scope,
            item.report,
            asyncio.get_running_loop().create_future(),
        )

    def _check_room(self, sequence: Sequence) -> None:
        if self._is_closed:
            raise _stopping()
        limit = min(self.planner.most_tokens, self.spec.max_tokens)
        if sequence.most_tokens > limit:
            raise InvalidInput(
                "options.max_new_tokens",
                f"{sequence.prompt_tokens} tokens of the prompt and {sequence.options.max_new_tokens} new ones, the "
                f"executor's cache for this model holds {limit}",
            )
        waiting, most = len(self.planner.waiting), self._max_queue_sequences
        if waiting >= most:
            retry_after_s = max(_MIN_RETRY_AFTER_S, waiting / max(1, len(self.planner.running)))
            raise Overloaded(f"{waiting} prompts wait for {self.spec.name!r}, the limit is {most}", retry_after_s)

    def _sweep(self) -> None:
        """Takes out the sequences whose callers left, or whose deadlines have passed."""
        now_s = time.monotonic()
        for sequence in list(self.planner):
            if sequence.future.done():
                self.planner.end(sequence)
            elif now_s >= sequence.deadline_s:
                self._fail(sequence, DeadlineExceeded("the deadline passed before the text was complete"))

    def _step(self, planned: Mapping[Sequence, Run]) -> list[int | NeuronpipeError]:
        """Computes a step, and chooses the next token of each sequence that is scored. Runs in the thread."""
        scores = self._model.compute(list(planned.values()))
        chosen: list[int | NeuronpipeError] = []
        for sequence in (one for one, run in planned.items() if run.is_scored):
            row = len(chosen)
            own = scores.logits[row], scores.top_ids[row], scores.top_logits[row]
            try:
                token = sequence.chooser.choose(sequence.token_ids, *own)
            except NotFinite:
                chosen.append(InternalError("the model's outputs for this input are not finite"))
                continue
            chosen.append(token)
            if sequence.options.HasField("top_logprobs"):
                sequence.logprobs = [token_logprobs(token, *own, sequence.options.top_logprobs)]
        return chosen

    def _apply(self, planned: Mapping[Sequence, Run], chosen: list[int | NeuronpipeError], began_ns: int) -> None:
        """Gives each sequence of a step its token, and ends those that are complete."""
        now_ns = time.monotonic_ns()
        self._observer.step(planned, began_ns, now_ns)
        tokens = iter(chosen)
        for sequence, run in planned.items():
            self.planner.finish(sequence, len(run.token_ids))
            if not run.is_scored:
                continue
            token = next(tokens)
            if sequence.future.done():  # its caller has left
                continue
            if isinstance(token, NeuronpipeError):
                self._fail(sequence, token)
                continue
            before_ns = sequence.last_token_ns or sequence.arrived_ns
            sequence.append(token, now_ns)
            self._observer.token(sequence, now_ns - before_ns)
            if sequence.report:
                sequence.report(NewTokens((token,), sequence.figures, sequence.logprobs))
            if token in sequence.end_token_ids or sequence.generated >= sequence.options.max_new_tokens:
                self.planner.end(sequence)
                sequence.future.set_result(_END if token in sequence.end_token_ids else _LENGTH)

    def _fail(self, sequence: Sequence, error: NeuronpipeError) -> None:
        self.planner.end(sequence)
        if not sequence.future.done():
            sequence.future.set_exception(error)


def _stopping() -> Unavailable:
    return Unavailable("the neuron-executor is stopping")


def _deadline_s(call: Call) -> float:
    return float("inf") if call.deadline_s is None else call.deadline_s
