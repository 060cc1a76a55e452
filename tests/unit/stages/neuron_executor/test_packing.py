"""stages/neuron_executor/packing.py: which sequences share a place, and whose result is whose."""

import random

from neuronpipe.stages.neuron_executor.packing import pack, unpack


def test_without_a_number_of_rows_each_sequence_has_its_own_place_in_the_order_of_the_input() -> None:
    assert [list(place) for place in pack([8, 24, 16], None)] == [[0], [1], [2]]


def test_places_are_filled_in_the_order_of_lengths_whatever_the_order_of_the_input() -> None:
    assert pack([8, 24, 16, 24, 8], lambda length: 2) == [[1, 3], [2, 0], [4]]


def test_the_longest_sequence_of_a_place_sets_the_number_of_its_rows() -> None:
    assert pack([8, 8, 8, 32], lambda length: 64 // length) == [[3, 0], [1, 2]]


def test_a_place_takes_at_most_256_tokens_of_padding() -> None:
    assert pack([256, 128, 128, 128], lambda length: 9) == [[0, 1, 2], [3]]


def test_each_result_returns_to_the_position_of_its_sequence() -> None:
    seed = 20261130
    generator = random.Random(seed)
    for most_rows in (None, lambda length: 3):
        lengths = [8 * generator.randint(1, 9) for _ in range(40)]
        places = pack(lengths, most_rows)
        results = [[lengths[position] for position in place] for place in places]
        assert unpack(places, results) == lengths, f"seed {seed}"
