"""Compiles the grammars of one model in threads, and keeps the grammars that were used last.

Neither the event loop nor the steps wait for a compilation. Each tenant has its own threads and kept grammars. A
compilation cannot be stopped, so a compilation that takes too long is abandoned, and its tenant waits until it has
ended.
"""

import asyncio
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Generic, NamedTuple, TypeVar

from neuronpipe.core.errors import InvalidInput, NeuronpipeError, Overloaded
from neuronpipe.stages.neuron_executor.runtimes.host import ComputeThread, give_way

_COMPILE_LIMIT_S = 5.0
_LOOKS_S = 0.1
# A request that waits longer than this lets others run in its place, and a compilation that takes longer gives way.
_SOON_S = 0.02
# Grammars that are compiled at the same time, each of another tenant.
_PLACES = 4
# Limits of compiled grammars that are kept. The least recently used grammar of the tenant with most of them goes first.
# A grammar of 42,000 characters takes 15 MB. Repetitions count as if they were written out: a{9000} takes 3 MB.
_MAX_KEPT, _MAX_KEPT_CHARACTERS, _KEPT_S = 64, 1 << 18, 600
# Freeing a grammar of 20,000 characters takes 2 ms, in which nothing else runs. Grammars are freed one after another,
# with pauses, but soon enough that few wait, however fast other grammars replace them.
_FREES_EVERY_S, _FREES_WITHIN_S = 0.02, 0.1
# Expressions that a grammar may have. The library's own limit of a million lets a{150000} take 60 MB and 25 ms a step.
# A list of 4,000 words of 20 letters is below this limit.
MOST_EXPRESSIONS = 50_000
# The parts of a regex that decide how long it is with its repetitions written out.
_REPEATED = re.compile(r"\\.|\[(?:\\.|[^\]\\])+\]|[()]|\{(\d{1,9})(?:,(\d{0,9}))?\}")

CompiledT = TypeVar("CompiledT")


class _Grammar(NamedTuple):
    """A grammar as its tenant has written it. `option`: the field of the options that contains it."""

    tenant: str
    option: str
    text: str


@dataclass(eq=False, slots=True)
class _GrammarJob(Generic[CompiledT]):
    """A grammar to compile or to keep.

    - `size`: its characters; from the start of its compilation, with repetitions written out.
    - `thread_id`: the thread that compiles it. `spent_s`: returns the CPU time of that thread.
    """

    grammar: _Grammar
    compiled: "asyncio.Future[CompiledT | NeuronpipeError]"
    size: int
    used_s: float = 0.0
    has_begun: bool = False
    thread_id: int = 0
    spent_s: Callable[[], float] = float

    def cancel_unbegun(self) -> None:
        """Cancels the compilation if it has not begun, because no request waits for it."""
        if not self.has_begun:
            self.compiled.cancel()


class GrammarJobs(Generic[CompiledT]):
    """The compilations and compiled grammars of one model. Its owner calls it on the event loop, and closes it."""

    def __init__(self, model_name: str, compile_grammar: Callable[[str, str], CompiledT | NeuronpipeError]) -> None:
        """`compile_grammar`: makes a grammar of its option and text, or returns its error. Threads call it."""
        self._model_name = model_name
        self._compile = compile_grammar
        # The least recently used first.
        self._kept: dict[_Grammar, _GrammarJob[CompiledT]] = {}
        # When the last superfluous grammar is freed, by the event loop's clock.
        self._frees_last_s = 0.0
        self._sweep: asyncio.TimerHandle | None = None
        # By tenant. The first tenant has the next turn.
        self._waiting: dict[str, list[_GrammarJob[CompiledT]]] = {}
        # The tenants for which a thread computes.
        self._compiling: set[str] = set()

    def close(self) -> None:
        if self._sweep:
            self._sweep.cancel()
        for job in chain.from_iterable(self._waiting.values()):
            job.cancel_unbegun()
        self._waiting.clear()

    async def compiled(self, tenant: str, option: str, text: str, wait: Callable[[bool], None]) -> CompiledT:
        """Returns the compiled grammar of an option's text. See Grammars.grammar_for for `wait` and the errors."""
        job = self._job(_Grammar(tenant, option, text))
        if not job.compiled.done():
            await asyncio.wait([job.compiled], timeout=_SOON_S)  # cancels nothing
        if not job.compiled.done():
            wait(True)
            await _wait_for(job)
            wait(False)
        if job.compiled.cancelled():
            raise Overloaded("the grammars of other requests are being compiled", _COMPILE_LIMIT_S)
        compiled = job.compiled.result()
        if isinstance(compiled, NeuronpipeError):
            raise compiled.with_traceback(None)  # otherwise each caller would lengthen the traceback
        return compiled

    def _job(self, grammar: _Grammar) -> _GrammarJob[CompiledT]:
        job = self._kept.pop(grammar, None)
        if job is None or job.compiled.cancelled():
            job = _GrammarJob(grammar, asyncio.get_running_loop().create_future(), len(grammar.text))
            self._waiting.setdefault(grammar.tenant, []).append(job)
        job.used_s = time.monotonic()
        self._kept[grammar] = job
        self._free_superfluous(job.used_s)
        self._begin()
        return job

    def _free_superfluous(self, now_s: float) -> None:
        """Frees the grammars beyond the limits, now and when the least recently used grammar has been kept for long."""
        while grammar := self._superfluous(now_s):
            job = self._kept.pop(grammar)
            job.cancel_unbegun()
            self._free_later(job)
        if self._kept and not self._sweep:
            self._sweep = asyncio.get_running_loop().call_later(_KEPT_S, self._end_sweep)

    def _end_sweep(self) -> None:
        self._sweep = None
        self._free_superfluous(time.monotonic())

    def _free_later(self, job: _GrammarJob[CompiledT]) -> None:
        """Keeps a job until its turn to be freed: the timer refers to it."""
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        self._frees_last_s = min(max(self._frees_last_s, now_s) + _FREES_EVERY_S, now_s + _FREES_WITHIN_S)
        loop.call_at(self._frees_last_s, job.cancel_unbegun)

    def _superfluous(self, now_s: float) -> _Grammar | None:
        """Returns the grammar that makes room; None if there is room. The newest grammar never makes room."""
        oldest = next(iter(self._kept), None)
        if oldest and now_s - self._kept[oldest].used_s > _KEPT_S:
            return oldest
        if len(self._kept) <= _MAX_KEPT and sum(job.size for job in self._kept.values()) <= _MAX_KEPT_CHARACTERS:
            return None
        *older, _ = self._kept
        parts = Counter[str]()
        for grammar in older:
            parts[grammar.tenant] += max(_MAX_KEPT_CHARACTERS // _MAX_KEPT, self._kept[grammar].size)
        return next((grammar for grammar in older if grammar.tenant == max(parts, key=parts.__getitem__)), None)

    def _begin(self) -> None:
        """Compiles one grammar of each tenant at the same time, in turns if there are too many tenants."""
        wanted = {name: [job for job in jobs if not job.compiled.cancelled()] for name, jobs in self._waiting.items()}
        self._waiting = {name: jobs for name, jobs in wanted.items() if jobs}
        tenants = [name for name in self._waiting if name not in self._compiling]
        for tenant in tenants[: _PLACES - len(self._compiling)]:
            job, *later = self._waiting.pop(tenant)
            if later:
                self._waiting[tenant] = later
            job.has_begun = True
            self._compiling.add(tenant)
            thread = ComputeThread(f"grammar-{self._model_name}")
            ended = asyncio.wrap_future(thread.submit(partial(self._run, job)))
            ended.add_done_callback(partial(self._end, job))
            thread.close()
            _give_way_later(job)

    def _end(self, job: _GrammarJob[CompiledT], ended: "asyncio.Future[CompiledT | NeuronpipeError]") -> None:
        self._compiling.remove(job.grammar.tenant)
        if error := ended.exception():
            job.compiled.set_exception(error)
        else:
            job.compiled.set_result(ended.result())
        self._free_superfluous(job.used_s)  # the size is known now
        self._begin()

    def _run(self, job: _GrammarJob[CompiledT]) -> CompiledT | NeuronpipeError:
        job.spent_s, job.thread_id = _stopwatch(), threading.get_native_id()
        job.size = written_out_size(job.grammar.text)
        return self._compile(job.grammar.option, job.grammar.text)


def written_out_size(text: str) -> int:
    """Counts the characters of a grammar whose repetitions are written out, at most the expressions that it may have.

    A text that contains patterns is read like a pattern.
    """
    sizes, last, end = [0], 0, 0
    for match in _REPEATED.finditer(text):
        if match.start() > end:
            sizes[-1] += match.start() - end
            last = 1
        end, part = match.end(), match[0]
        if part == "(":
            sizes.append(0)
            continue
        if match[1]:
            last *= max(0, int(match[2] or match[1]) - 1)  # the first repetition is counted
        else:
            last = sizes.pop() if part == ")" and len(sizes) > 1 else 1
        last = min(last, MOST_EXPRESSIONS)
        sizes[-1] += last
    return min(MOST_EXPRESSIONS, sum(sizes) + len(text) - end)


def _give_way_later(job: _GrammarJob[CompiledT]) -> None:
    """Gives a compilation the lowest priority once it takes long, so that the steps of all texts go before it."""
    if job.spent_s() > _SOON_S:
        give_way(job.thread_id)
    elif not job.compiled.done():
        asyncio.get_running_loop().call_later(_SOON_S, _give_way_later, job)


async def _wait_for(job: _GrammarJob[CompiledT]) -> None:
    """Waits until a grammar is compiled or its compilation is given up. Raises InvalidInput after the time limit."""
    left_s = _COMPILE_LIMIT_S
    while not job.compiled.done():
        await asyncio.wait([job.compiled], timeout=max(left_s, _LOOKS_S))
        job.cancel_unbegun()
        left_s = _COMPILE_LIMIT_S - job.spent_s()
        if not job.compiled.done() and left_s <= 0:
            give_way(job.thread_id)
            problem = f"takes more than {_COMPILE_LIMIT_S:g} s to compile, the limit"
            raise InvalidInput(f"options.{job.grammar.option}", problem)


def _stopwatch() -> Callable[[], float]:
    """Makes a function that returns the CPU seconds of the calling thread since now, or the seconds that have passed if
    the system does not count them. It returns 0 once the thread has ended.
    """
    on_linux = sys.platform == "linux"
    clock = time.pthread_getcpuclockid(threading.get_ident()) if on_linux else time.CLOCK_MONOTONIC
    began_s = time.clock_gettime(clock)

    def spent_s() -> float:
        try:
            return time.clock_gettime(clock) - began_s
        except OSError:
            return 0.0

    return spent_s
