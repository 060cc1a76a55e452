"""One generating model of the executor: takes items, and tells what the steps bring them."""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from hashlib import blake2b

import numpy as np

from neuronpipe.api.v1.tasks_pb2 import GenerationOptions
from neuronpipe.core.calls import Call
from neuronpipe.core.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidInput,
    NeuronpipeError,
    Overloaded,
    Unavailable,
)
from neuronpipe.core.items import ExecuteItem, Prediction
from neuronpipe.core.logs import log_fault
from neuronpipe.core.metrics import Telemetry
from neuronpipe.core.model import ModelSpec
from neuronpipe.core.packed import TensorSets
from neuronpipe.core.tensors import Arrays, ArraySets
from neuronpipe.stages.neuron_executor.backends.base import CoreLost
from neuronpipe.stages.neuron_executor.cores import CoresLost
from neuronpipe.stages.neuron_executor.generation.beams import BeamSearch
from neuronpipe.stages.neuron_executor.generation.blocks import BlockPool
from neuronpipe.stages.neuron_executor.generation.grammars import Grammars, TextGrammar
from neuronpipe.stages.neuron_executor.generation.observer import GenerationObserver, StepRecord
from neuronpipe.stages.neuron_executor.generation.pace import Pace
from neuronpipe.stages.neuron_executor.generation.planner import Planner, Row, Sequence
from neuronpipe.stages.neuron_executor.generation.prompt_lookup import PromptLookup
from neuronpipe.stages.neuron_executor.generation.sampling import TokenChooser
from neuronpipe.stages.neuron_executor.generation.steps import Progress, StepLoop
from neuronpipe.stages.neuron_executor.runtimes.decoder import DecoderLost, DecoderModel
from neuronpipe.stages.neuron_executor.runtimes.host import ComputeThread
from neuronpipe.tasks.inputs.kind import input_kind
from neuronpipe.tasks.text_generation import (
    GenerationFacts,
    check_options,
    logprob_arrays,
    part_arrays,
    prompt_arrays,
)

# The shortest retry delay of a refused caller.
_MIN_RETRY_AFTER_S = 0.05
_DIGEST_BYTES = 16
# Of the scores after a step's tokens, 4 bytes for each of the vocabulary. Without it, prompts that are scored had
# 155 MB in a step, with a vocabulary of 152,000.
_SPARE_SCORES_BYTES = 16 << 20
# The number of times that a step is looked at before it counts as hung.
_LOOKS = 10


class Generator:
    """Generates texts with one model. Its owner runs `work`, and closes it."""

    def __init__(
        self,
        model: DecoderModel,
        spec: ModelSpec,
        telemetry: Telemetry,
        observer: GenerationObserver,
        tokenizer_json: Callable[[], bytes],
        *,
        max_sequences: int,
        step_tokens: int,
        max_queue_sequences: int,
        max_prompt_wait_s: float,
        step_limit_s: float,
        prompt_lookup_tokens: int = 0,
    ) -> None:
        """`tokenizer_json`: the model's tokenizer, which is read when a text must first have a grammar.

        `max_prompt_wait_s`: a prompt that would wait longer for its first step is refused; 0: no limit.

        `step_limit_s`: a step that takes longer counts as hung; see `work`.

        `prompt_lookup_tokens`: of a draft, see prompt_lookup.py; none where the model scores the ends of runs only.
        """
        self.spec = spec
        pool = BlockPool(model.blocks, model.block_tokens)
        spare_scores = max(model.part_tokens, _SPARE_SCORES_BYTES // (4 * spec.vocabulary_size))
        self.planner = Planner(pool, Pace(model.part_tokens), max_sequences, step_tokens, spare_scores)
        self._most_scored = model.part_tokens if model.scores_all else 1
        self._draft_tokens = prompt_lookup_tokens if model.scores_all else 0
        self._grammars = Grammars(spec, tokenizer_json)
        self._kind = input_kind(spec)
        self._tracer = telemetry.tracer
        self._observer = observer
        self._max_queue_sequences = max_queue_sequences
        self._max_prompt_wait_s = max_prompt_wait_s or float("inf")
        facts = GenerationFacts.of(spec)
        self._facts = facts
        self._end_token_ids = frozenset(facts.end_token_ids)
        self._start_ids = list(facts.decoder_start_token_ids)
        self._numbers = itertools.count()
        self._steps = StepLoop(spec.name, model, self.planner, self._tell_from_thread)
        self._thread = ComputeThread(f"generate-{spec.name}")
        self._step_limit_s = step_limit_s
        self._working = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        observer.watch(
            running=lambda: len(self.planner.running),
            waiting=lambda: len(self.planner.waiting),
            blocks=lambda: self.planner.blocks_in_use / model.blocks,
        )

    @property
    def unplanned(self) -> AbstractContextManager[object]:
        """While it is held, no step is planned; the one that runs goes on. The thread that holds it may add texts."""
        return self._steps.changed

    async def generate(self, item: ExecuteItem) -> Prediction:
        """Generates the text of one item, and reports its tokens as they come.

        Raises InvalidInput, Overloaded, DeadlineExceeded, Unavailable and InternalError. If it is cancelled, the next
        step is without the sequence.
        """
        arrived_ns, trace = time.monotonic_ns(), self._tracer.joined(item.call.trace)
        options = self._checked(item)
        sequence = self._sequence_of(item, options, await self._grammars.of(options))
        sequence.arrived_ns = arrived_ns
        sequence.trace = trace.child() if trace else None
        with self.unplanned:
            self._check_room(sequence)
            self.planner.add(sequence)
        # Later, so that those who come at the same time are in the same step.
        asyncio.get_running_loop().call_soon(self._steps.wake)
        try:
            finish_reason = await sequence.future
        except BaseException as error:
            self._observer.failed(sequence, trace, error)
            self._steps.wake()  # if it was cancelled, the next plan frees its blocks
            raise
        self._observer.finished(sequence, trace)
        figures = sequence.figures
        return Prediction(
            TensorSets(arrays=_outputs(sequence, finish_reason)),
            queue_ns=figures.queue_ns,
            compute_ns=figures.prefill_ns + figures.decode_ns,
            generation=figures,
        )

    async def work(self) -> None:
        """Runs steps until the generator is closed. Raises CoresLost when a step hangs; its thread is left alone."""
        async with self._working:
            self._loop = asyncio.get_running_loop()
            stepping = asyncio.wrap_future(self._thread.submit(self._steps.run))
            try:
                while not stepping.done():
                    await asyncio.wait([stepping], timeout=self._step_limit_s / _LOOKS)
                    if limit_s := self._steps.hangs_after_s(self._step_limit_s):
                        raise CoreLost(f"a step did not end within {limit_s:g} s")
                await stepping
            except (CoreLost, DecoderLost) as fault:
                log_fault("core lost", fault, model=self.spec.name, sequences=len(self.planner.running))
                raise CoresLost(f"no core is left for the model {self.spec.name!r}") from fault
            finally:
                self._refuse()
                self._thread.close()

    async def close(self) -> None:
        """Ends all sequences, and waits until `work` has ended: for the step that runs, if it does not hang."""
        self._refuse()
        async with self._working:
            self._observer.unwatch()

    def _refuse(self) -> None:
        """Takes no more sequences, and ends those that are there."""
        self._steps.close()
        self._grammars.close()
        with self.unplanned:
            for sequence in self.planner:
                if not sequence.future.done():
                    sequence.future.set_exception(_stopping())

    def _tell_from_thread(self, progress: Iterable[Progress], record: StepRecord | None) -> None:
        assert self._loop  # noqa: S101 (steps run only while `work` does)
        self._loop.call_soon_threadsafe(self._tell, progress, record)

    def _tell(self, progress: Iterable[Progress], record: StepRecord | None) -> None:
        """Gives callers what a step has brought them, on the event loop, while the next step is computed."""
        for one in progress:
            if one.sequence.future.done():  # its caller has left
                continue
            try:
                self._tell_one(one)
            except Exception as fault:  # those that have ended are known to nobody else, so the others are told
                log_fault("tokens could not be passed on", fault, model=self.spec.name)
                one.sequence.future.set_exception(InternalError("the text's tokens could not be passed on"))
        if record:  # at last, for what it raises must not keep tokens back
            self._observer.step(record)

    def _tell_one(self, one: Progress) -> None:
        future, report = one.sequence.future, one.sequence.report
        if one.gap_ns is not None:
            self._observer.tokens(one.count, one.gap_ns, is_first=one.is_first)
        if report and one.tokens:
            report(one.tokens)
        if isinstance(one.ends_by, NeuronpipeError):
            future.set_exception(one.ends_by)
        elif one.ends_by is not None:
            future.set_result(one.ends_by)

    def _checked(self, item: ExecuteItem) -> GenerationOptions:
        """The options of an item. Raises InvalidInput."""
        if item.options is None or len(item.sequences) != 1:
            raise InvalidInput("input", f"model {self.spec.name!r} generates; it takes one prompt with its options")
        self._kind.check(item.sequences.arrays[0])
        check_options(item.options, self.spec)
        return item.options

    def _sequence_of(self, item: ExecuteItem, options: GenerationOptions, grammar: TextGrammar | None) -> Sequence:
        (arrays,) = item.sequences.arrays
        given = arrays["input_ids"].tolist()
        # With an encoder, the input is the source, and the text has a beginning of its own.
        token_ids, source_ids = ([*self._start_ids], given) if self._start_ids else (given, [])
        # Texts of other sources have other keys and values, whatever their tokens.
        source = blake2b(repr(source_ids).encode(), digest_size=_DIGEST_BYTES).hexdigest() if source_ids else ""
        start = len(token_ids)
        ends = self._end_token_ids | frozenset(options.stop_token_ids)
        searches = options.num_beams > 1
        return Sequence(
            (item.call.is_bulk, item.call.is_beyond_share, next(self._numbers)),
            [Row(token_ids)],
            options,
            BeamSearch(options, start, ends, self._facts, given, grammar)
            if searches
            else TokenChooser(options, start, ends, self._facts, given, item.sequence, grammar),
            ends,
            _deadline_s(item.call),
            item.call.caller.cache_scope + source,
            item.report,
            asyncio.get_running_loop().create_future(),
            source_ids,
            most_scored=self._most_scored,
            lookup=None if searches or not self._draft_tokens else PromptLookup(source_ids, self._draft_tokens),
        )

    def _check_room(self, sequence: Sequence) -> None:
        if self._steps.is_closed:
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
            setting = f"the limit is {most} (the executor's max_queue_sequences)"
            raise Overloaded(f"{waiting} prompts wait for {self.spec.name!r}, {setting}", retry_after_s)
        wait_s = self.planner.wait_s(sequence)
        if wait_s > self._max_prompt_wait_s:
            raise Overloaded(
                f"a prompt would wait {wait_s:.2g} s for its first step, the limit is {self._max_prompt_wait_s:g} s "
                "(the executor's max_prompt_wait_s)",
                max(_MIN_RETRY_AFTER_S, wait_s - self._max_prompt_wait_s),
            )
        if time.monotonic() + wait_s > sequence.deadline_s:
            raise DeadlineExceeded(f"the first step would begin in {wait_s:.2g} s, after the deadline")


def _outputs(sequence: Sequence, finish_reason: int) -> ArraySets:
    """The text of a sequence that has ended, or those that its search has found, best first."""
    start, chooser = sequence.prompt_tokens, sequence.chooser
    if not isinstance(chooser, BeamSearch):
        (whole,) = part_arrays(sequence.token_ids[start:], finish_reason)
        if sequence.scores_prompt:
            whole = {**whole, **prompt_arrays(sequence.token_ids[:start], sequence.prompt_logprobs)}
        return [whole]
    outputs: list[Arrays] = []
    for text in chooser.best:
        (arrays,) = part_arrays(text.token_ids[start:], text.finish_reason)
        outputs.append({**arrays, "score": np.array(text.score, np.float32)})
        if sequence.options.HasField("top_logprobs"):
            outputs[-1] = {**outputs[-1], **logprob_arrays(text.logprobs)}
    return outputs


def _stopping() -> Unavailable:
    return Unavailable("the neuron-executor is stopping")


def _deadline_s(call: Call) -> float:
    return float("inf") if call.deadline_s is None else call.deadline_s
