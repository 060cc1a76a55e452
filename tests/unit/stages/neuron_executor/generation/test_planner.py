"""generation/planner.py: the forecast of a wait counts the rows that go first, as texts come, begin and leave."""

import asyncio
import random

from neuronpipe.api.v1.tasks_pb2 import GenerationOptions
from neuronpipe.stages.neuron_executor.generation.blocks import BlockPool
from neuronpipe.stages.neuron_executor.generation.pace import Pace
from neuronpipe.stages.neuron_executor.generation.planner import Planner
from neuronpipe.stages.neuron_executor.generation.sampling import TokenChooser
from neuronpipe.stages.neuron_executor.generation.sequence import GeneratedSequence, Rank, SequenceCaller, TextRow
from neuronpipe.tasks.text_generation import GenerationFacts

_ROWS, _SEED = 4, 20261130


def _sequence(number: int, tenant: str, *, is_bulk: bool, is_beyond_share: bool) -> GeneratedSequence:
    options = GenerationOptions(max_new_tokens=8)
    caller = SequenceCaller(asyncio.get_running_loop().create_future(), tenant=tenant)
    chooser = TokenChooser(options, 3, frozenset(), GenerationFacts(), [1, 2, 3], 0, None)
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
        share, _ = planner._shares.of(sequence.tenant, 1.0)
        expected_s = min(pace.wait_s(len(ahead) + 1, _ROWS), pace.wait_s(len(own) + 1, min(share, _ROWS)))
        assert planner.wait_s(sequence) == expected_s, f"seed {_SEED}, sequence {number}"
        planner.add(sequence)
        if generator.random() < 0.4:
            planner.plan()
        for leaving in [other for other in planner if generator.random() < 0.1]:
            planner.end(leaving)
    for sequence in list(planner):
        planner.end(sequence)
    assert not planner.waiting._rows
