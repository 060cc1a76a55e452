"""The steps of one generating model, in a thread of their own, which plans a step, computes it and chooses tokens.

The thread shares the planner with the event loop, and holds the planner's lock only while it plans, and while it notes
the progress of a step. The event loop passes progress to callers while the next step is computed. The event loop never
waits for the lock, because the thread has a lower priority, and may have no CPU for a long time while it holds the
lock. The event loop tries again later, and does other work until then.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from queue import SimpleQueue

from neuronpipe.api.v1.tasks_pb2 import FinishReason
from neuronpipe.core.errors import DeadlineExceeded, InternalError, InvalidInput, NeuronpipeError
from neuronpipe.core.generated import NewTokens
from neuronpipe.core.logs import log_fault
from neuronpipe.platform.process.running_time import RunningTime
from neuronpipe.stages.neuron_executor.errors import uncomputable
from neuronpipe.stages.neuron_executor.generation.beams import BeamSearch, BeamStep
from neuronpipe.stages.neuron_executor.generation.observer import StepRecord
from neuronpipe.stages.neuron_executor.generation.planner import Planner
from neuronpipe.stages.neuron_executor.generation.sampling import NotFinite, token_logprobs
from neuronpipe.stages.neuron_executor.generation.sequence import GeneratedSequence
from neuronpipe.stages.neuron_executor.runtimes.decoder import DecoderLost, DecoderModel, DecoderRun, TokenScores

_END, _LENGTH = FinishReason.FINISH_REASON_END, FinishReason.FINISH_REASON_LENGTH
# A step hangs when it takes longer than this multiple of the longest step before, and longer than the configured limit.
_HANGS_AFTER = 10
# The interval between two checks of the deadlines of waiting sequences.
_SWEEP_S = 0.05

# The tokens of a text, the continuations of a search, or the error of either.
_Chosen = tuple[int, ...] | list[BeamStep] | NeuronpipeError


@dataclass(frozen=True, slots=True)
class SequenceProgress:
    """The progress of a sequence. `ends_by`: a finish reason or an error, or None for a sequence that continues.

    - `gap_ns`: time since the token before, or since arrival for the first token; None without a token.
    - `tokens`: tokens for the listener, if the sequence has a listener.
    - `count`: number of the text's tokens that come together.
    """

    sequence: GeneratedSequence
    ends_by: int | NeuronpipeError | None
    gap_ns: int | None = None
    is_first: bool = False
    tokens: NewTokens | None = None
    count: int = 0


class StepLoop:
    """Runs the steps.

    - `tell`: called in the thread with the progress of sequences, and the step that caused it.
    - `limit_s`: the time that each step may take. A step may also take ten times as long as the longest step before.
    """

    def __init__(
        self,
        name: str,
        model: DecoderModel,
        planner: Planner,
        tell: Callable[[list[SequenceProgress], StepRecord | None], None],
        limit_s: float,
    ) -> None:
        self._name = name
        self._model = model
        self._planner = planner
        self._tell = tell
        # Guards the planner.
        self.lock = threading.RLock()
        self.is_closed = False
        # Holds one item while there is something to plan. Only the event loop puts items.
        self._news: SimpleQueue[None] = SimpleQueue()
        # The sequences whose callers have left.
        self._left: deque[GeneratedSequence] = deque()
        self._swept_s = 0.0
        self._began_s: float | None = None
        self._longest_s, self._min_limit_s = 0.0, limit_s
        self.step_time = RunningTime(limit_s)

    def run(self) -> None:
        """Runs steps until it is closed. Raises DecoderLost."""
        while planned := self._next():
            self._run_step(planned)

    def wake(self) -> None:
        """Lets the thread plan new sequences."""
        if self._news.empty():
            self._news.put(None)

    def abandon(self, sequence: GeneratedSequence) -> None:
        """Ends a sequence whose caller has left, before the next step."""
        self._left.append(sequence)
        self.wake()

    def close(self) -> None:
        """Begins no more steps."""
        self.is_closed = True
        self.wake()

    @property
    def limit_s(self) -> float:
        """The time after which a step hangs."""
        return max(self._min_limit_s, _HANGS_AFTER * self._longest_s)

    def hangs(self, now_s: float) -> bool:
        """Returns whether the running step hangs. The event loop calls this every `step_time.look_s` seconds."""
        return self.step_time.look(self._began_s, now_s) >= self.limit_s

    def _next(self) -> dict[GeneratedSequence, list[DecoderRun]]:
        """Waits for the next step; empty once the loop is closed."""
        while not self.is_closed:
            with self.lock:
                if late := self._sweep():
                    self._tell(late, None)
                if planned := self._planner.plan():
                    return planned
            self._news.get()
        return {}

    def _sweep(self) -> list[SequenceProgress]:
        """Removes sequences whose callers left or whose deadlines passed. Returns the end of each late sequence.

        Checks waiting sequences at intervals only, because there may be thousands.
        """
        now_s, late = time.monotonic(), []
        while self._left:
            self._planner.remove(self._left.popleft())
        texts: Iterable[GeneratedSequence] = self._planner.running
        if now_s - self._swept_s > _SWEEP_S:
            texts, self._swept_s = self._planner, now_s
        for sequence in [text for text in texts if text.caller.future.done() or now_s >= text.caller.deadline_s]:
            self._planner.remove(sequence)
            if not sequence.caller.future.done():
                error = DeadlineExceeded("the deadline passed before the text was complete")
                late.append(SequenceProgress(sequence, error))
        return late

    def _run_step(self, planned: Mapping[GeneratedSequence, list[DecoderRun]]) -> None:
        began_ns = time.monotonic_ns()
        self._began_s = began_s = began_ns / 1e9
        for sequence in planned:
            sequence.record.started_ns = sequence.record.started_ns or began_ns
        record = StepRecord.of(planned, began_ns)
        try:
            chosen = self._compute(planned)
        except DecoderLost:
            raise
        except Exception as fault:
            log_fault("a step could not be computed", fault, model=self._name, sequences=len(planned))
            with self.lock:
                self._tell([self._fail(sequence, uncomputable()) for sequence in planned], None)
            return
        finally:
            if (step_s := time.monotonic() - began_s) <= 2 * self.limit_s:  # otherwise the process stood still
                self._longest_s = max(self._longest_s, step_s)
            self._began_s = None
        ended_ns = time.monotonic_ns()
        with self.lock:
            self._note_pace(planned, ended_ns - began_ns)
            progress = [*self._advance(planned, chosen, ended_ns)]
        self._tell(progress, record.ended(ended_ns))

    def _compute(self, planned: Mapping[GeneratedSequence, list[DecoderRun]]) -> dict[GeneratedSequence, _Chosen]:
        """Computes a step. Returns the next tokens of each scored sequence, and the error of each failed sequence.

        Raises DecoderLost, and the error of a step that failed as a whole.
        """
        self._model.copy(self._planner.blocks.take_copies())
        chosen: dict[GeneratedSequence, _Chosen] = {}
        for sequence, runs in planned.items():
            if sequence.source.unread:
                try:
                    self._model.read(sequence.source.token_ids, runs[0].source_blocks)
                except DecoderLost:
                    raise
                except Exception as fault:
                    log_fault("a source could not be read", fault, model=self._name)
                    chosen[sequence] = uncomputable()
        computed = {sequence: runs for sequence, runs in planned.items() if sequence not in chosen}
        if not computed:
            return chosen
        scores = self._model.compute([run for runs in computed.values() for run in runs])
        row = 0
        for sequence, runs in computed.items():
            if not runs[0].scored:
                continue
            try:
                if (tokens := _choose(sequence, scores, row, runs[0])) is not None:
                    chosen[sequence] = tokens
            except NotFinite:
                chosen[sequence] = InternalError("the model's outputs for this input are not finite")
            except InvalidInput as error:
                chosen[sequence] = error
            except Exception as fault:
                log_fault("a token could not be chosen", fault, model=self._name)
                chosen[sequence] = InternalError("the next token was not chosen")
            row += len(runs) * runs[0].scored
        return chosen

    def _advance(
        self,
        planned: Mapping[GeneratedSequence, list[DecoderRun]],
        chosen: Mapping[GeneratedSequence, _Chosen],
        now_ns: int,
    ) -> Iterable[SequenceProgress]:
        """Gives each sequence of a step its tokens, and ends complete and failed sequences."""
        for sequence, runs in planned.items():
            choice = chosen.get(sequence)
            if isinstance(choice, NeuronpipeError):
                yield self._fail(sequence, choice)  # the blocks stay unpublished: other texts would share wrong values
                continue
            refused = 0
            if isinstance(choice, tuple):
                sequence.token_ids.extend(choice)
                refused = sequence.drafts.note(len(choice) - 1)
            self._planner.finish(sequence, len(runs[0].token_ids) - refused)
            if choice is None or sequence.caller.future.done():  # a part of a prompt, or the caller has left
                continue
            record = sequence.record
            is_first, before_ns = not record.first_token_ns, record.last_token_ns or record.arrived_ns
            reason = self._advance_text(sequence, choice)
            record.note_token(now_ns)
            tokens = None
            if sequence.caller.sink and isinstance(choice, tuple):
                tokens = NewTokens(choice, record.figures, sequence.logprobs)
            if reason:
                self._planner.remove(sequence)
                self._planner.note_text(sequence, (now_ns - record.started_ns) / 1e9)
            count = len(choice) if isinstance(choice, tuple) else 1
            yield SequenceProgress(
                sequence=sequence,
                ends_by=reason,
                gap_ns=now_ns - before_ns,
                is_first=is_first,
                tokens=tokens,
                count=count,
            )

    def _advance_text(self, sequence: GeneratedSequence, choice: tuple[int, ...] | list[BeamStep]) -> int | None:
        """Adds the next token to all texts of a search. Returns the reason why the text ends there, or None."""
        if isinstance(choice, list):
            if choice:
                self._planner.blocks.fork(sequence, choice)
                return None
            assert isinstance(sequence.chooser, BeamSearch)  # noqa: S101 (only a search chooses steps)
            return sequence.chooser.best[0].finish_reason
        if choice[-1] in sequence.end_token_ids:
            return _END
        return _LENGTH if sequence.generated >= sequence.options.max_new_tokens else None

    def _note_pace(self, planned: Mapping[GeneratedSequence, list[DecoderRun]], took_ns: int) -> None:
        """Notes the time of a step without sources. A source is computed as a whole, regardless of its time."""
        if not any(sequence.source.unread for sequence in planned):
            prompts = [runs for sequence, runs in planned.items() if sequence.left > 1]
            read_tokens = sum(len(run.token_ids) for runs in prompts for run in runs)
            answered = sum(len(runs) for runs in planned.values()) - sum(len(runs) for runs in prompts)
            self._planner.pace.note_step(read_tokens, answered, took_ns / 1e9)

    def _fail(self, sequence: GeneratedSequence, error: NeuronpipeError) -> SequenceProgress:
        self._planner.remove(sequence)
        return SequenceProgress(sequence, error)


def _choose(
    sequence: GeneratedSequence, scores: TokenScores, row: int, run: DecoderRun
) -> tuple[int, ...] | list[BeamStep] | None:
    """Chooses the next tokens of a sequence, or the continuations of its search, by the scores from a row on.

    None if the next token is known because the prompt is being scored. Raises NotFinite.
    """
    drafted, prompt_scores = len(sequence.drafts.token_ids), sequence.prompt_scores
    if prompt_scores:
        for position in range(sequence.computed + 1, sequence.computed + 1 + run.scored - drafted):
            # Other places were scored before a preemption.
            if len(prompt_scores.logprobs) < position < sequence.prompt_tokens:
                place, top_logprobs = row + position - sequence.computed - 1, sequence.options.top_logprobs
                prompt_scores.logprobs.append(token_logprobs(sequence.token_ids[position], scores, place, top_logprobs))
        if run.past + len(run.token_ids) < len(sequence.token_ids):
            return None
    if isinstance(sequence.chooser, BeamSearch):
        rows = slice(row, row + len(sequence.rows))
        return sequence.chooser.advance([text.token_ids for text in sequence.rows], scores.at(rows))
    token_ids, chosen, sequence.logprobs = sequence.token_ids, tuple[int, ...](), []
    for place, guess in enumerate((*sequence.drafts.token_ids, None), row + run.scored - 1 - drafted):
        try:
            token_id = sequence.chooser.choose(token_ids, scores, place)
            if sequence.options.HasField("top_logprobs"):
                sequence.logprobs.append(token_logprobs(token_id, scores, place, sequence.options.top_logprobs))
        except Exception:
            if chosen:  # the caller gets these tokens, and the next step meets the error again
                break
            raise
        chosen += (token_id,)
        if token_id != guess or token_id in sequence.end_token_ids:
            break
        token_ids = [*sequence.token_ids, *chosen]
    return chosen
