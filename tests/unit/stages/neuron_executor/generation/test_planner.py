"""generation/planner.py: the forecast of a wait counts the rows that go first, and many rows take turns beside few."""

import asyncio
import random
from collections import Counter

import pytest

from neuronpipe.api.v1.tasks_pb2 import GenerationOptions
from neuronpipe.stages.neuron_executor.generation.blocks import BlockPool
from neuronpipe.stages.neuron_executor.generation.logit_rules import LogitRules
from neuronpipe.stages.neuron_executor.generation.pace import Pace
from neuronpipe.stages.neuron_executor.generation.planner import Planner
from neuronpipe.stages.neuron_executor.generation.sampling import TokenChooser
from neuronpipe.stages.neuron_executor.generation.sequence import GeneratedSequence, Rank, SequenceCaller, TextRow
from neuronpipe.tasks.text_options import GenerationFacts

_ROWS, _SEED = 4, 20261130


def _sequence(
    number: int, tenant: str, *, is_bulk: bool = False, is_beyond_share: bool = False, weight: float = 1.0
) -> GeneratedSequence:
    options = GenerationOptions(max_new_tokens=8)
    caller = SequenceCaller(asyncio.get_running_loop().create_future(), tenant=tenant, weight=weight)
    chooser = TokenChooser(LogitRules(options, 3, frozenset(), GenerationFacts(), [1, 2, 3]))
    rank = Rank(is_bulk, is_beyond_share, number)
    return GeneratedSequence(rank, [TextRow([1, 2, number])], options, chooser, frozenset(), caller)


async def test_a_wait_is_forecast_by_the_rows_that_go_first() -> None:
    generator = random.Random(_SEED)
    pace = Pace(16)
    pace.note_text(4.0)
    planner = Planner(BlockPool(40, 16), pace, _ROWS, 16, 16)
    for number in range(300):
        priority = {name: generator.random() < 0.3 for name in ("is_bulk", "is_beyond_share")}
        sequence = _sequence(number, generator.choice("abc"), **priority)
        ahead = [*planner.running, *(other for other in planner.waiting if other.rank < sequence.rank)]
        own = [other for other in ahead if other.tenant == sequence.tenant]
        share, _ = planner._shares.share_of(sequence.tenant, 1.0)
        expected_s = min(pace.wait_s(len(ahead) + 1, _ROWS), pace.wait_s(len(own) + 1, min(share, _ROWS)))
        assert planner.wait_s(sequence) == expected_s, f"seed {_SEED}, sequence {number}"
        planner.add(sequence)
        if generator.random() < 0.4:
            planner.plan()
        for leaving in [other for other in planner if generator.random() < 0.1]:
            planner.remove(leaving)
    for sequence in list(planner):
        planner.remove(sequence)
    assert not planner.waiting._rows


async def test_a_wait_behind_a_tenants_own_texts_is_forecast_by_how_long_they_take() -> None:
    planner = Planner(BlockPool(40, 16), Pace(16), _ROWS, 16, 16)
    texts = [_sequence(number, tenant) for number, tenant in enumerate("ab")]
    for text in texts:
        planner.add(text)
    planner.plan()
    for _ in range(9):
        planner.note_text(texts[0], 30.0)
        planner.note_text(texts[1], 0.1)
    for number in range(2, 8):
        planner.add(_sequence(number, "b"))
    last = [_sequence(9, tenant) for tenant in "bc"]
    # Two rows are a share of two tenants, and one row of three. Eight texts of "b" have come.
    assert planner.wait_s(last[0]) == pytest.approx((8 - 2) * 0.1 / 2)
    assert planner.wait_s(last[1]) == 0


def _pace(overhead_s: float, row_s: float) -> Pace:
    pace = Pace(16)
    for rows in (1, 8, 16) * 20:
        pace.note_step(0, rows, overhead_s + rows * row_s)
    return pace


def _steps(pace: Pace, rows: dict[str, int], steps: int, **weights: float) -> list[Counter[str]]:
    """The number of rows of each tenant in each of the steps after all texts have read their prompts."""
    planner = Planner(BlockPool(100, 16), pace, 16, 256, 16)
    for number, tenant in enumerate(tenant for tenant, count in rows.items() for _ in range(count)):
        planner.add(_sequence(number, tenant, weight=weights.get(tenant, 1.0)))
    found, advanced, now_ns = list[Counter[str]](), Counter[GeneratedSequence](), 0
    while len(found) < steps:
        planned = planner.plan()
        if len(advanced) == sum(rows.values()) or all(sequence.left == 1 for sequence in planner):
            advanced.update({sequence: sequence in planned for sequence in planner})
            found.append(Counter(sequence.tenant for sequence in planned))
        now_ns += 1
        for sequence, runs in planned.items():
            planner.finish(sequence, len(runs[0].token_ids))
            sequence.token_ids.append(5)
            sequence.record.note_token(now_ns)
    for tenant in rows:
        counts = [count for sequence, count in advanced.items() if sequence.tenant == tenant]
        assert max(counts) - min(counts) <= 1, "the texts of a tenant advance evenly"
    return found


@pytest.mark.parametrize(
    ("overhead_s", "row_s", "rows", "in_a_step"),
    [
        pytest.param(0.004, 0.001, {"a": 14, "b": 1}, {"a": 5, "b": 1}, id="many rows take turns"),
        pytest.param(0.01, 0.001, {"a": 14, "b": 1}, {"a": 11, "b": 1}, id="more rows go with a step that costs more"),
        pytest.param(0.1, 0.001, {"a": 14, "b": 1}, {"a": 14, "b": 1}, id="cheap rows have no turns"),
        pytest.param(0.001, 0.001, {"a": 8, "b": 8}, {"a": 8, "b": 8}, id="tenants with equal rows have no turns"),
        pytest.param(0.004, 0.001, {"a": 16}, {"a": 16}, id="a tenant alone has all rows"),
        pytest.param(0.004, 0.001, {"a": 10, "b": 2, "c": 3}, {"a": 6, "b": 2, "c": 3}, id="three tenants"),
    ],
)
async def test_the_rows_of_a_tenant_take_at_most_as_long_as_a_step_of_another_tenant_alone(
    overhead_s: float, row_s: float, rows: dict[str, int], in_a_step: dict[str, int]
) -> None:
    found = _steps(_pace(overhead_s, row_s), rows, 12)
    assert found == [Counter(in_a_step)] * 12


async def test_a_tenant_of_more_weight_has_more_rows_beside_another_tenants_rows() -> None:
    assert _steps(_pace(0.004, 0.001), {"a": 14, "b": 1}, 4, a=2.0) == [Counter(a=10, b=1)] * 4


async def test_no_row_takes_turns_before_the_time_of_a_row_is_known() -> None:
    assert _steps(Pace(16), {"a": 14, "b": 1}, 4) == [Counter(a=14, b=1)] * 4
