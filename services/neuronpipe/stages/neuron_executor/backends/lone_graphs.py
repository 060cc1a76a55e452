"""Static graphs for the most frequent lengths of single texts.

A graph of dynamic shape prepares each of its nodes again when the shape changes, which takes a third of the time of a
short text in int8 (docs/decisions/0007-batches-by-what-they-cost.md). A graph of one shape has nothing to prepare. Each
graph has its own copy of the weights, so the budget of the process limits their number.
"""

import threading
from collections import Counter
from collections.abc import Callable

from neuronpipe.core.logs import log_fault
from neuronpipe.stages.neuron_executor.backends.base import ByteBudget
from neuronpipe.stages.neuron_executor.runtimes.host import resident_bytes
from neuronpipe.stages.neuron_executor.runtimes.openvino import openvino

# A length gets a graph after this number of lone texts. After fewer texts it may be chance, and the first callers would
# wait while the graph is compiled.
_LEAST_TEXTS = 16
# Another length replaces the rarest graph when it has come this many times as often.
_CLEARLY = 2
# After this many lone texts each count is halved, so that graphs follow the traffic.
_MEMORY = 512


# Minimum size charged for a graph: freed memory can hide the size of a new graph.
_LEAST_GRAPH_BYTES = 8 << 20


class LoneGraphs:
    """The graphs of one model for texts that are computed one at a time."""

    def __init__(
        self,
        compile: Callable[[int], openvino.InferRequest],
        start: Callable[[Callable[[], None]], object],
        budget: ByteBudget,
        graph_bytes: int,
    ) -> None:
        """`compile`: makes the graph of a length. `start`: runs a function in another thread soon.

        `graph_bytes`: the expected size of the first graph, which is the size of the graph of any shape.
        """
        self._compile = compile
        self._start = start
        self._budget = budget
        self._graph_bytes = max(_LEAST_GRAPH_BYTES, graph_bytes)
        self._counts: Counter[int] = Counter()
        self._total = 0
        self._graphs: dict[int, openvino.InferRequest] = {}
        self._sizes: dict[int, int] = {}
        # The part of the budget that is reserved for the graph being compiled.
        self._reserved_bytes = 0
        self._is_closed = False
        self._lock = threading.Lock()

    @property
    def sizes(self) -> dict[int, int]:
        """The bytes of each graph by its length in tokens."""
        with self._lock:
            return dict(sorted(self._sizes.items()))

    def find(self, tokens: int) -> openvino.InferRequest | None:
        """Counts a text of a padded length, and returns the graph of that length; None if there is none yet."""
        with self._lock:
            self._counts[tokens] += 1
            self._total += 1
            if self._total % _MEMORY == 0:
                self._counts = Counter({length: count // 2 for length, count in self._counts.items()})
            graph = self._graphs.get(tokens)
            if graph is None and not self._reserved_bytes and not self._is_closed and self._makes_room(tokens):
                self._reserved_bytes = self._graph_bytes
                self._start(lambda: self._make(tokens))
            return graph

    def _makes_room(self, tokens: int) -> bool:
        """Returns whether a length gets a graph now. If so, makes room for the graph in the budget."""
        count = self._counts[tokens]
        if count < _LEAST_TEXTS:
            return False
        if self._budget.take(self._graph_bytes):
            return True
        rarest = min(self._graphs, key=self._counts.__getitem__, default=None)
        if rarest is None or count < _CLEARLY * self._counts[rarest] + _LEAST_TEXTS:
            return False
        self._drop(rarest)
        return self._budget.take(self._graph_bytes)

    def _make(self, tokens: int) -> None:
        graph, before_bytes = None, resident_bytes()
        try:
            graph = self._compile(tokens)
        except RuntimeError as error:
            log_fault("single texts run on the graph of any shape: OpenVINO could not compile one length", error)
        with self._lock:
            size_bytes = max(_LEAST_GRAPH_BYTES, resident_bytes() - before_bytes)
            taken_bytes, self._reserved_bytes = self._reserved_bytes, 0
            if graph is None or self._is_closed:
                self._budget.give_back(taken_bytes)
                self._is_closed = True  # otherwise the next length would fail at each text
                return
            if size_bytes < taken_bytes:  # other threads that compute meanwhile can only add to it
                self._budget.give_back(taken_bytes - size_bytes)
                self._graph_bytes = size_bytes
            self._graphs[tokens], self._sizes[tokens] = graph, self._graph_bytes

    def _drop(self, tokens: int) -> None:
        del self._graphs[tokens]
        self._budget.give_back(self._sizes.pop(tokens))

    def forget(self) -> None:
        """Frees the graphs, which may be compiled again."""
        with self._lock:
            for tokens in list(self._graphs):
                self._drop(tokens)

    def close(self) -> None:
        """Frees the graphs for ever, and the memory of a graph that may never be compiled."""
        with self._lock:
            self._is_closed = True
            self._budget.give_back(self._reserved_bytes)
            self._reserved_bytes = 0
        self.forget()
