"""backends/lone_graphs.py: which lengths get a graph, and that the budget of the process gets all memory back."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from neuronpipe.stages.neuron_executor.backends import lone_graphs
from neuronpipe.stages.neuron_executor.backends.base import ByteBudget
from neuronpipe.stages.neuron_executor.backends.lone_graphs import LoneGraphs

_MB = 1 << 20
# A graph of the tests, and how often a length has to come before it has a graph.
_GRAPH = 30 * _MB
_LEAST_TEXTS = 16


class _Compiler:
    """Compiles when the test says so. The memory of the process grows by each graph."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pending: deque[Callable[[], None]] = deque()
        self.compiled: list[int] = []
        self.failing: set[int] = set()
        self.graph_bytes, self._resident_bytes = _GRAPH, 0
        monkeypatch.setattr(lone_graphs, "resident_bytes", lambda: self._resident_bytes)

    def compile(self, tokens: int) -> Any:
        if tokens in self.failing:
            raise RuntimeError("a length that the test chose")
        self.compiled.append(tokens)
        self._resident_bytes += self.graph_bytes
        return f"graph of {tokens}"

    def graphs(self, budget: ByteBudget, graph_bytes: int = _GRAPH) -> LoneGraphs:
        return LoneGraphs(self.compile, self.pending.append, budget, graph_bytes)

    def run(self) -> None:
        """Compiles what was asked for."""
        while self.pending:
            self.pending.popleft()()


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> _Compiler:
    return _Compiler(monkeypatch)


def _send(graphs: LoneGraphs, tokens: int, texts: int = _LEAST_TEXTS) -> None:
    for _ in range(texts):
        graphs.find(tokens)


def _free_bytes(budget: ByteBudget) -> int:
    """The bytes that are free, to the MiB."""
    taken = 0
    while budget.take(_MB):
        taken += _MB
    budget.give_back(taken)
    return taken


def test_a_length_has_a_graph_once_it_has_come_often_enough(compiler: _Compiler) -> None:
    graphs = compiler.graphs(ByteBudget(_GRAPH))
    _send(graphs, 8, _LEAST_TEXTS - 1)
    _send(graphs, 16, _LEAST_TEXTS - 1)
    assert not compiler.pending
    assert graphs.find(8) is None  # as it is only being compiled
    compiler.run()
    assert graphs.find(8) == "graph of 8"
    assert graphs.find(24) is None
    assert (compiler.compiled, graphs.sizes) == ([8], {8: _GRAPH})


def test_a_single_length_is_compiled_at_once(compiler: _Compiler) -> None:
    budget = ByteBudget(3 * _GRAPH)
    graphs = compiler.graphs(budget)
    _send(graphs, 8)
    _send(graphs, 16, 40)
    assert (len(compiler.pending), _free_bytes(budget)) == (1, 2 * _GRAPH)
    compiler.run()
    graphs.find(16)
    compiler.run()
    assert compiler.compiled == [8, 16]


@pytest.mark.parametrize("limit_bytes", [0, _GRAPH - 1])
def test_without_room_for_a_graph_there_is_none(compiler: _Compiler, limit_bytes: int) -> None:
    graphs = compiler.graphs(ByteBudget(limit_bytes))
    _send(graphs, 8, 1000)
    assert (list(compiler.pending), graphs.sizes) == ([], {})


def test_models_share_one_budget(compiler: _Compiler) -> None:
    budget = ByteBudget(2 * _GRAPH)
    models = [compiler.graphs(budget) for _ in range(3)]
    for model in models:
        _send(model, 8)
        compiler.run()
    assert [list(model.sizes) for model in models] == [[8], [8], []]
    models[0].close()
    _send(models[2], 8, 1)
    compiler.run()
    assert [list(model.sizes) for model in models] == [[], [8], [8]]


def test_a_length_that_has_become_clearly_more_frequent_takes_the_place_of_the_rarest(compiler: _Compiler) -> None:
    budget = ByteBudget(2 * _GRAPH)
    graphs = compiler.graphs(budget)
    for tokens, texts in (8, 18), (16, 17):
        _send(graphs, tokens, texts)
        compiler.run()
    # Twice as often as 16, and sixteen times more: 2 x 17 + 16.
    _send(graphs, 24, 49)
    assert not compiler.pending
    _send(graphs, 24, 1)
    assert (list(graphs.sizes), _free_bytes(budget)) == ([8], 0)
    compiler.run()
    assert (list(graphs.sizes), _free_bytes(budget)) == ([8, 24], 0)


def test_graphs_follow_traffic_that_has_changed(compiler: _Compiler) -> None:
    graphs = compiler.graphs(ByteBudget(_GRAPH))
    _send(graphs, 8, 5000)
    compiler.run()
    # 512 texts halve the counts, of which the first is at most 1024.
    _send(graphs, 16, 1500)
    compiler.run()
    assert list(graphs.sizes) == [16]


def test_a_graph_that_needs_less_than_was_expected_leaves_room_for_another(compiler: _Compiler) -> None:
    budget = ByteBudget(100 * _MB)
    compiler.graph_bytes = 20 * _MB
    graphs = compiler.graphs(budget, 90 * _MB)
    _send(graphs, 8)
    compiler.run()
    assert (graphs.sizes, _free_bytes(budget)) == ({8: 20 * _MB}, 80 * _MB)


def test_a_graph_counts_even_where_its_memory_does_not_show(compiler: _Compiler) -> None:
    budget = ByteBudget(100 * _MB)
    compiler.graph_bytes = -_GRAPH  # other memory was freed meanwhile
    graphs = compiler.graphs(budget, 0)
    for tokens in range(8, 800, 8):
        _send(graphs, tokens)
        compiler.run()
    assert len(graphs.sizes) == 12  # of 8 MiB


def test_what_is_forgotten_is_given_back_and_compiled_again(compiler: _Compiler) -> None:
    budget = ByteBudget(2 * _GRAPH)
    graphs = compiler.graphs(budget)
    _send(graphs, 8)
    compiler.run()
    graphs.forget()
    assert (graphs.sizes, _free_bytes(budget)) == ({}, 2 * _GRAPH)
    assert graphs.find(8) is None
    compiler.run()
    assert graphs.find(8) == "graph of 8"


def test_a_closed_model_has_given_everything_back_and_compiles_nothing(compiler: _Compiler) -> None:
    budget = ByteBudget(2 * _GRAPH)
    graphs = compiler.graphs(budget)
    _send(graphs, 8)
    compiler.run()
    graphs.close()
    _send(graphs, 16, 40)
    assert (list(compiler.pending), graphs.sizes, _free_bytes(budget)) == ([], {}, 2 * _GRAPH)


def test_a_graph_that_was_asked_for_and_never_compiled_is_given_back(compiler: _Compiler) -> None:
    budget = ByteBudget(2 * _GRAPH)
    graphs = compiler.graphs(budget)
    _send(graphs, 8)
    compiler.pending.clear()  # as a pool of threads does that shuts down
    graphs.close()
    assert _free_bytes(budget) == 2 * _GRAPH


def test_a_length_that_cannot_be_compiled_is_given_back_and_told_once(
    compiler: _Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="neuronpipe")
    budget = ByteBudget(2 * _GRAPH)
    graphs = compiler.graphs(budget)
    _send(graphs, 8)
    compiler.run()
    compiler.failing = {16}
    for _ in range(20):
        graphs.find(16)
        compiler.run()
    assert (list(graphs.sizes), _free_bytes(budget)) == ([8], _GRAPH)
    expected = ["single texts run on the graph of any shape: OpenVINO could not compile one length"]
    assert [record.message for record in caplog.records] == expected
    assert graphs.find(8) == "graph of 8"


def test_a_model_that_closes_while_a_graph_is_compiled_gives_everything_back_once(compiler: _Compiler) -> None:
    budget, compiling, may_end = ByteBudget(2 * _GRAPH), threading.Event(), threading.Event()

    def compile(tokens: int) -> Any:
        compiling.set()
        assert may_end.wait(20)
        return compiler.compile(tokens)

    threads: list[threading.Thread] = []

    def start(function: Callable[[], None]) -> None:
        threads.append(threading.Thread(target=function))
        threads[-1].start()

    graphs = LoneGraphs(compile, start, budget, _GRAPH)
    _send(graphs, 8)
    assert compiling.wait(20)
    graphs.close()
    may_end.set()
    threads[0].join(20)
    assert (compiler.compiled, graphs.sizes, _free_bytes(budget)) == ([8], {}, 2 * _GRAPH)


def test_threads_that_send_forget_and_close_at_once_leave_the_budget_whole(compiler: _Compiler) -> None:
    budget = ByteBudget(3 * _GRAPH)
    for _ in range(20):
        graphs = LoneGraphs(compiler.compile, lambda make: threading.Thread(target=make).start(), budget, _GRAPH)

        def send(graphs: LoneGraphs = graphs) -> None:
            for number in range(200):
                graphs.find(8 * (number % 7))
                if number % 50 == 0:
                    graphs.forget()

        before = set(threading.enumerate())
        senders = [threading.Thread(target=send) for _ in range(4)]
        for sender in senders:
            sender.start()
        senders[0].join(20)
        graphs.close()
        for thread in set(threading.enumerate()) - before:
            thread.join(20)
        assert (graphs.sizes, _free_bytes(budget)) == ({}, 3 * _GRAPH)
