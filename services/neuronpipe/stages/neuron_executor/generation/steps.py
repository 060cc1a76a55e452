"""The steps of one generating model, in a thread of their own: plans one, computes it, chooses tokens, and so on.

The thread shares the planner with the event loop, and holds its lock only while it plans, and while it notes what a
step has brought. That is told on the event loop, which passes it on while the next step is computed.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from neuronpipe.api.v1.tasks_pb2 import FinishReason
from neuronpipe.core.errors import DeadlineExceeded, InternalError, InvalidInput, NeuronpipeError
from neuronpipe.core.generated import NewTokens
from neuronpipe.core.logs import log_fault
from neuronpipe.stages.neuron_executor.generation.beams import BeamSearch, Step
from neuronpipe.stages.neuron_executor.generation.observer import StepRecord
from neuronpipe.stages.neuron_executor.generation.planner import Planner, Sequence
from neuronpipe.stages.neuron_executor.generation.sampling import NotFinite, token_logprobs
from neuronpipe.stages.neuron_executor.runtimes.decoder import DecoderLost, DecoderModel, Run, Scores

_END, _LENGTH = FinishReason.FINISH_REASON_END, FinishReason.FINISH_REASON_LENGTH
# A step hangs when it has taken this many times the longest one before it, and longer than the configured limit.
_HANGS_AFTER = 10
_NOT_COMPUTED = "the model could not compute this input"

# Tokens, or those of a search.
_Chosen = tuple[int, ...] | list[Step] | NeuronpipeError


@dataclass(frozen=True, slots=True)
class Progress:
    """What a sequence has got. `ends_by`: why it ends there, a finish reason or an error; None: it goes on.

    `gap_ns`: since the token before, or for the first one since arrival; None where there is no token. `tokens`: for
    its listener, if it has one. `count`: how many tokens of its text there are, which come together.
    """

    sequence: Sequence
    ends_by: int | NeuronpipeError | None
    gap_ns: int | None = None
    is_first: bool = False
    tokens: NewTokens | None = None
    count: int = 0


class StepLoop:
    """Runs the steps. `tell` is called in the thread: with what sequences have got, and the step that brought it."""

    def __init__(
        self,
        name: str,
        model: DecoderModel,
        planner: Planner,
        tell: Callable[[list[Progress], StepRecord | None], None],
    ) -> None:
        self._name = name
        self._model = model
        self._planner = planner
        self._tell = tell
        # Guards the planner, and what follows.
        self.changed = threading.Condition()
        self.is_closed = False
        self._began_s: float | None = None
        self._longest_s = 0.0

    def run(self) -> None:
        """Runs steps until it is closed. Raises DecoderLost."""
        while planned := self._next():
            self._run_step(planned)

    def wake(self) -> None:
        """There are new sequences."""
        with self.changed:
            self.changed.notify()

    def close(self) -> None:
        """Begins no more steps."""
        with self.changed:
            self.is_closed = True
            self.changed.notify()

    def hangs_after_s(self, limit_s: float) -> float | None:
        """The limit that the step which runs has passed; None if it has not."""
        began_s, limit_s = self._began_s, max(limit_s, _HANGS_AFTER * self._longest_s)
        return limit_s if began_s is not None and time.monotonic() - began_s > limit_s else None

    def _next(self) -> dict[Sequence, list[Run]]:
        """Waits for a step; nothing once it is closed."""
        with self.changed:
            while not self.is_closed:
                if late := self._sweep():
                    self._tell(late, None)
                if planned := self._planner.plan():
                    return planned
                self.changed.wait()
        return {}

    def _sweep(self) -> list[Progress]:
        """Takes out the sequences whose callers left, and those whose deadlines have passed, which it returns."""
        now_s, late = time.monotonic(), []
        for sequence in [one for one in self._planner if one.future.done() or now_s >= one.deadline_s]:
            self._planner.end(sequence)
            if not sequence.future.done():
                error = DeadlineExceeded("the deadline passed before the text was complete")
                late.append(Progress(sequence, error))
        return late

    def _run_step(self, planned: Mapping[Sequence, list[Run]]) -> None:
        began_ns = time.monotonic_ns()
        self._began_s = began_s = began_ns / 1e9
        for sequence in planned:
            sequence.started_ns = sequence.started_ns or began_ns
        record = StepRecord.of(planned, began_ns)
        try:
            chosen = self._compute(planned)
        except DecoderLost:
            raise
        except Exception as fault:
            log_fault("a step could not be computed", fault, model=self._name, sequences=len(planned))
            with self.changed:
                self._tell([self._fail(sequence, InternalError(_NOT_COMPUTED)) for sequence in planned], None)
            return
        finally:
            self._longest_s = max(self._longest_s, time.monotonic() - began_s)
            self._began_s = None
        ended_ns = time.monotonic_ns()
        with self.changed:
            self._note_pace(planned, ended_ns - began_ns)
            progress = [*self._advance(planned, chosen, ended_ns)]
        self._tell(progress, record.ended(ended_ns))

    def _compute(self, planned: Mapping[Sequence, list[Run]]) -> dict[Sequence, _Chosen]:
        """Computes a step. Returns the next tokens of each sequence that is scored, and the error of each that failed.

        Raises DecoderLost, and what the step as a whole raises.
        """
        self._model.copy(self._planner.take_copies())
        chosen: dict[Sequence, _Chosen] = {}
        for sequence, runs in planned.items():
            if sequence.unread:
                try:
                    self._model.read(sequence.source_ids, runs[0].source_blocks)
                except DecoderLost:
                    raise
                except Exception as fault:
                    chosen[sequence] = self._fault("a source could not be read", fault, _NOT_COMPUTED)
        computed = {sequence: runs for sequence, runs in planned.items() if sequence not in chosen}
        if not computed:
            return chosen
        scores = self._model.compute([run for runs in computed.values() for run in runs])
        row = 0
        for sequence, runs in computed.items():
            if not runs[0].scored:
                continue
            try:
                if (next_ := _choose(sequence, scores, row, runs[0])) is not None:
                    chosen[sequence] = next_
            except NotFinite:
                chosen[sequence] = InternalError("the model's outputs for this input are not finite")
            except InvalidInput as error:
                chosen[sequence] = error
            except Exception as fault:
                chosen[sequence] = self._fault("a token could not be chosen", fault, "the next token was not chosen")
            row += len(runs) * runs[0].scored
        return chosen

    def _fault(self, event: str, fault: Exception, told: str) -> InternalError:
        """Logs the fault of one sequence, which is the only one to end. Returns what its caller is told."""
        log_fault(event, fault, model=self._name)
        return InternalError(told)

    def _advance(
        self, planned: Mapping[Sequence, list[Run]], chosen: Mapping[Sequence, _Chosen], now_ns: int
    ) -> Iterable[Progress]:
        """Gives each sequence of a step its tokens, and ends those that are complete, and those that failed."""
        for sequence, runs in planned.items():
            next_ = chosen.get(sequence)
            if isinstance(next_, NeuronpipeError):
                yield self._fail(sequence, next_)  # its blocks are not published: others would share what is in them
                continue
            refused = 0
            if isinstance(next_, tuple):
                sequence.token_ids.extend(next_)
                refused = _note_draft(sequence, len(next_) - 1)
            self._planner.finish(sequence, len(runs[0].token_ids) - refused)
            if next_ is None or sequence.future.done():  # a part of its prompt; or its caller has left
                continue
            is_first, before_ns = not sequence.first_token_ns, sequence.last_token_ns or sequence.arrived_ns
            reason = self._go_on(sequence, next_)
            sequence.note(now_ns)
            tokens = None
            if sequence.report and isinstance(next_, tuple):
                tokens = NewTokens(next_, sequence.figures, sequence.logprobs)
            if reason:
                self._planner.end(sequence)
                self._planner.pace.note_text((now_ns - sequence.started_ns) / 1e9)
            count = len(next_) if isinstance(next_, tuple) else 1
            yield Progress(sequence, reason, now_ns - before_ns, is_first, tokens, count)

    def _go_on(self, sequence: Sequence, next_: tuple[int, ...] | list[Step]) -> int | None:
        """Adds the next token to all texts of a search. Returns why the text ends there, or None."""
        if isinstance(next_, list):
            if next_:
                self._planner.fork(sequence, next_)
                return None
            assert isinstance(sequence.chooser, BeamSearch)  # noqa: S101 (it has chosen)
            return sequence.chooser.best[0].finish_reason
        if next_[-1] in sequence.end_token_ids:
            return _END
        return _LENGTH if sequence.generated >= sequence.options.max_new_tokens else None

    def _note_pace(self, planned: Mapping[Sequence, list[Run]], took_ns: int) -> None:
        """Of a step that read sources, nothing: these are computed as a whole, whatever they take."""
        if not any(sequence.unread for sequence in planned):
            prompts = [runs for sequence, runs in planned.items() if sequence.left > 1]
            read_tokens = sum(len(run.token_ids) for runs in prompts for run in runs)
            self._planner.pace.note_step(read_tokens, len(planned) - len(prompts), took_ns / 1e9)

    def _fail(self, sequence: Sequence, error: NeuronpipeError) -> Progress:
        self._planner.end(sequence)
        return Progress(sequence, error)


def _choose(sequence: Sequence, scores: Scores, row: int, run: Run) -> tuple[int, ...] | list[Step] | None:
    """The next tokens of a sequence, or of its texts, whose scores begin with a row; None where they are there already,
    and are scored. Raises NotFinite.
    """
    drafted = len(sequence.draft)
    if sequence.scores_prompt:
        for known in range(sequence.computed + 1, sequence.computed + 1 + run.scored - drafted):
            if len(sequence.prompt_logprobs) < known < sequence.prompt_tokens:  # or scored before a preemption
                place, most = row + known - sequence.computed - 1, sequence.options.top_logprobs
                sequence.prompt_logprobs.append(token_logprobs(sequence.token_ids[known], scores, place, most))
        if run.past + len(run.token_ids) < len(sequence.token_ids):
            return None
    if isinstance(sequence.chooser, BeamSearch):
        rows = slice(row, row + len(sequence.rows))
        return sequence.chooser.advance([one.token_ids for one in sequence.rows], scores.at(rows))
    token_ids, chosen, sequence.logprobs = sequence.token_ids, tuple[int, ...](), []
    for place, guess in enumerate((*sequence.draft, None), row + run.scored - 1 - drafted):
        try:
            token_id = sequence.chooser.choose(token_ids, scores, place)
            if sequence.options.HasField("top_logprobs"):
                sequence.logprobs.append(token_logprobs(token_id, scores, place, sequence.options.top_logprobs))
        except Exception:
            if chosen:  # they are passed on, and the next step meets the error again
                break
            raise
        chosen += (token_id,)
        if token_id != guess or token_id in sequence.end_token_ids:
            break
        token_ids = [*sequence.token_ids, *chosen]
    return chosen


def _note_draft(sequence: Sequence, accepted: int) -> int:
    """Counts the tokens of a sequence's draft, of which `accepted` were. Returns how many were not."""
    if sequence.lookup and sequence.draft:
        sequence.lookup.note(accepted)
    drafted, sequence.draft = len(sequence.draft), []
    sequence.drafted += drafted
    sequence.accepted += accepted
    return drafted - accepted
