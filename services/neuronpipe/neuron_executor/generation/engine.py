"""One generating model of the executor: takes items, and runs its steps one after the other in a thread of its own."""

import asyncio
import itertools
import time
from collections.abc import Mapping
from hashlib import blake2b

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
from neuronpipe.neuron_executor.backends.base import CoreLost
from neuronpipe.neuron_executor.cores import CoresLost
from neuronpipe.neuron_executor.generation.beams import BeamSearch, Step
from neuronpipe.neuron_executor.generation.blocks import BlockPool
from neuronpipe.neuron_executor.generation.observer import GenerationObserver
from neuronpipe.neuron_executor.generation.pace import Pace
from neuronpipe.neuron_executor.generation.planner import Planner, Row, Sequence
from neuronpipe.neuron_executor.generation.sampling import NotFinite, TokenChooser, token_logprobs
from neuronpipe.runtimes.cpus import ComputeThread
from neuronpipe.runtimes.decoder import DecoderLost, DecoderModel, Run
from neuronpipe.tasks.text_generation import GenerationFacts, check_options

# The shortest retry delay of a refused caller.
_MIN_RETRY_AFTER_S = 0.05
_DIGEST_BYTES = 16
# A step hangs when it has taken this many times the longest one before it, and longer than the configured limit.
_HANGS_AFTER = 10
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
        max_prompt_wait_s: float,
        step_limit_s: float,
    ) -> None:
        """`max_prompt_wait_s`: a prompt that would wait longer for its first step is refused; 0: no limit.

        `step_limit_s`: a step that takes longer counts as hung; see `work`.
        """
        self.spec = spec
        pool = BlockPool(model.blocks, model.block_tokens)
        self.planner = Planner(pool, Pace(model.part_tokens), max_sequences, step_tokens)
        self._model = model
        self._kind = input_kind(spec)
        self._tracer = telemetry.tracer
        self._observer = observer
        self._max_queue_sequences = max_queue_sequences
        self._max_prompt_wait_s = max_prompt_wait_s or float("inf")
        facts = GenerationFacts.of(spec)
        self._end_token_ids = frozenset(facts.end_token_ids)
        self._start_ids = list(facts.decoder_start_token_ids)
        self._numbers = itertools.count()
        self._has_work = asyncio.Event()
        self._thread = ComputeThread(f"generate-{spec.name}")
        self._step_limit_s = step_limit_s
        self._longest_step_s = 0.0
        self._is_closed = False
        self._working = asyncio.Lock()
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
        sequence.trace = trace.child() if trace else None
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
        chooser = sequence.chooser
        token_ids = chooser.best.token_ids if isinstance(chooser, BeamSearch) else sequence.token_ids
        outputs = {
            "token_ids": np.array(token_ids[sequence.prompt_tokens :], np.int32),
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
        """Runs steps until the generator is closed. Raises CoresLost when a step hangs; its thread is left alone."""
        async with self._working:
            try:
                await self._run_steps()
            finally:
                self._refuse()
                self._sweep()
                self._thread.close()

    async def _run_steps(self) -> None:
        while not self._is_closed:
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
                chosen = await self._run_step(planned)
            except CoresLost:
                raise
            except Exception as fault:
                log_fault("a step could not be computed", fault, model=self.spec.name, sequences=len(planned))
                for sequence in planned:
                    self._fail(sequence, InternalError("the model could not compute this input"))
                continue
            self._apply(planned, chosen, began_ns)

    async def _run_step(self, planned: Mapping[Sequence, list[Run]]) -> list[int | list[Step] | NeuronpipeError]:
        copies, began_s = self.planner.take_copies(), time.monotonic()
        limit_s = max(self._step_limit_s, _HANGS_AFTER * self._longest_step_s)
        try:
            async with asyncio.timeout(limit_s) as limit:
                return await asyncio.wrap_future(self._thread.submit(lambda: self._step(planned, copies)))
        except (TimeoutError, DecoderLost) as error:
            if isinstance(error, TimeoutError) and not limit.expired():
                raise
            fault = CoreLost(f"a step did not end within {limit_s:g} s") if limit.expired() else error
            log_fault("core lost", fault, model=self.spec.name, sequences=len(planned))
            raise CoresLost(f"no core is left for the model {self.spec.name!r}") from error
        finally:
            self._longest_step_s = max(self._longest_step_s, time.monotonic() - began_s)

    async def close(self) -> None:
        """Ends all sequences, and waits until `work` has ended: for the step that runs, if it does not hang."""
        self._refuse()
        async with self._working:
            self._observer.unwatch()

    def _refuse(self) -> None:
        """Takes no more sequences, and ends those that are there."""
        self._is_closed = True
        self._has_work.set()
        for sequence in self.planner:
            if not sequence.future.done():
                sequence.future.set_exception(_stopping())

    def _sequence_of(self, item: ExecuteItem) -> Sequence:
        if item.options is None or len(item.sequences) != 1:
            raise InvalidInput("input", f"model {self.spec.name!r} generates; it takes one prompt with its options")
        (arrays,) = item.sequences.arrays
        self._kind.check(arrays)
        check_options(item.options, self.spec)
        given = arrays["input_ids"].tolist()
        # With an encoder, the input is the source, and the text has a beginning of its own.
        token_ids, source_ids = ([*self._start_ids], given) if self._start_ids else (given, [])
        # Texts of other sources have other keys and values, whatever their tokens.
        source = blake2b(repr(source_ids).encode(), digest_size=_DIGEST_BYTES).hexdigest() if source_ids else ""
        ends = self._end_token_ids | frozenset(item.options.stop_token_ids)
        return Sequence(
            (item.call.is_bulk, item.call.is_beyond_share, next(self._numbers)),
            [Row(token_ids)],
            item.options,
            (BeamSearch if item.options.num_beams > 1 else TokenChooser)(item.options, len(token_ids), ends),
            ends,
            _deadline_s(item.call),
            item.call.caller.cache_scope + source,
            item.report,
            asyncio.get_running_loop().create_future(),
            source_ids,
        )

    def _check_room(self, sequence: Sequence) -> None:
        if self._is_closed:
            raise _stopping()
        is_too_long = not self._start_ids and sequence.most_tokens > self.spec.max_tokens
        if is_too_long or not self.planner.could_hold(sequence):
            limit = min(self.planner.most_tokens, self.spec.max_tokens) if is_too_long else self.planner.most_tokens
            raise InvalidInput(
                "options.max_new_tokens",
                f"{sequence.input_tokens} tokens of the {'text' if sequence.source_ids else 'prompt'} and "
                f"{sequence.options.max_new_tokens} new ones, the executor's cache for this model holds {limit}",
            )
        waiting, most = len(self.planner.waiting), self._max_queue_sequences
        if waiting >= most:
            retry_after_s = max(_MIN_RETRY_AFTER_S, waiting / max(1, len(self.planner.running)))
            raise Overloaded(f"{waiting} prompts wait for {self.spec.name!r}, the limit is {most}", retry_after_s)
        wait_s = self.planner.wait_s(sequence)
        if wait_s > self._max_prompt_wait_s:
            raise Overloaded(
                f"a prompt would wait {wait_s:.2g} s for its first step, the limit is {self._max_prompt_wait_s:g} s",
                max(_MIN_RETRY_AFTER_S, wait_s - self._max_prompt_wait_s),
            )
        if time.monotonic() + wait_s > sequence.deadline_s:
            raise DeadlineExceeded(f"the first step would begin in {wait_s:.2g} s, after the deadline")

    def _sweep(self) -> None:
        """Takes out the sequences whose callers left, or whose deadlines have passed."""
        now_s = time.monotonic()
        for sequence in list(self.planner):
            if sequence.future.done():
                self.planner.end(sequence)
            elif now_s >= sequence.deadline_s:
                self._fail(sequence, DeadlineExceeded("the deadline passed before the text was complete"))

    def _step(
        self, planned: Mapping[Sequence, list[Run]], copies: list[tuple[int, int]]
    ) -> list[int | list[Step] | NeuronpipeError]:
        """Computes a step, and chooses the next token of each sequence that is scored. Runs in the thread."""
        self._model.copy(copies)
        for sequence, runs in planned.items():
            if sequence.unread:
                self._model.read(sequence.source_ids, runs[0].source_blocks)
        scores = self._model.compute([run for runs in planned.values() for run in runs])
        chosen: list[int | list[Step] | NeuronpipeError] = []
        row = 0
        for sequence in (one for one, runs in planned.items() if runs[0].is_scored):
            of_rows = slice(row, row + len(sequence.rows))
            row += len(sequence.rows)
            found = scores.at(of_rows)
            try:
                if isinstance(sequence.chooser, BeamSearch):
                    chosen.append(sequence.chooser.advance([one.token_ids for one in sequence.rows], found))
                    continue
                token = sequence.chooser.choose(sequence.token_ids, found)
            except NotFinite:
                chosen.append(InternalError("the model's outputs for this input are not finite"))
                continue
            chosen.append(token)
            if sequence.options.HasField("top_logprobs"):
                sequence.logprobs = [token_logprobs(token, found, sequence.options.top_logprobs)]
        return chosen

    def _apply(
        self,
        planned: Mapping[Sequence, list[Run]],
        chosen: list[int | list[Step] | NeuronpipeError],
        began_ns: int,
    ) -> None:
        """Gives each sequence of a step its token, and ends those that are complete."""
        now_ns = time.monotonic_ns()
        self._observer.step(planned, began_ns, now_ns)
        self._note_pace(planned, now_ns - began_ns)
        found = iter(chosen)
        for sequence, runs in planned.items():
            self.planner.finish(sequence, len(runs[0].token_ids))
            if not runs[0].is_scored:
                continue
            next_ = next(found)
            if sequence.future.done():  # its caller has left
                continue
            if isinstance(next_, NeuronpipeError):
                self._fail(sequence, next_)
                continue
            before_ns = sequence.last_token_ns or sequence.arrived_ns
            reason = self._go_on(sequence, next_)
            sequence.note(now_ns)
            self._observer.token(sequence, now_ns - before_ns)
            if sequence.report and isinstance(next_, int):
                sequence.report(NewTokens((next_,), sequence.figures, sequence.logprobs))
            if reason:
                self.planner.end(sequence)
                self.planner.pace.note_text((now_ns - sequence.started_ns) / 1e9)
                sequence.future.set_result(reason)

    def _note_pace(self, planned: Mapping[Sequence, list[Run]], took_ns: int) -> None:
        """Of a step that read sources, nothing: these are computed as a whole, whatever they take."""
        if not any(sequence.unread for sequence in planned):
            prompts = [runs for sequence, runs in planned.items() if sequence.left > 1]
            read_tokens = sum(len(run.token_ids) for runs in prompts for run in runs)
            self.planner.pace.note_step(read_tokens, len(planned) - len(prompts), took_ns / 1e9)

    def _go_on(self, sequence: Sequence, next_: int | list[Step]) -> int:
        """Adds the next token, to all texts of a search. Returns why the text ends there, or 0."""
        if not isinstance(next_, int):
            if next_:
                self.planner.fork(sequence, next_)
                return 0
            assert isinstance(sequence.chooser, BeamSearch)  # noqa: S101 (it has chosen)
            return _END if sequence.chooser.best.token_ids[-1] in sequence.end_token_ids else _LENGTH
        sequence.token_ids.append(next_)
        if next_ in sequence.end_token_ids:
            return _END
        return _LENGTH if sequence.generated >= sequence.options.max_new_tokens else 0

    def _fail(self, sequence: Sequence, error: NeuronpipeError) -> None:
        self.planner.end(sequence)
        if not sequence.future.done():
            sequence.future.set_exception(error)


def _stopping() -> Unavailable:
    return Unavailable("the neuron-executor is stopping")


def _deadline_s(call: Call) -> float:
    return float("inf") if call.deadline_s is None else call.deadline_s
