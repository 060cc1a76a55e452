"""Packs the sequences of one input into places of the queue, and puts their results into the order of the input.

The sequences at one place wait together, are rows of the same batch, and get their results or an error together.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import itemgetter
from typing import TypeVar

ResultT = TypeVar("ResultT")

# Tokens of padding at one place. A token of static embeddings takes 0.8 µs. Another batch takes 1 ms, because it has
# its own shape (measured 2026-11-30, 2 busy virtual CPUs).
_MOST_PADDING = 256
# The one place of a sequence alone, which is the usual input.
_ALONE = ((0,),)


def pack(lengths: Sequence[int], most_rows: Callable[[int], int] | None) -> Sequence[Sequence[int]]:
    """Returns the positions in the input of the sequences at each place. The first sequence of a place is its longest.

    `lengths`: the padded lengths of the sequences. `most_rows`: returns the most sequences of a length at a place, and
    then sequences of near lengths share places. None gives each sequence its own place, in the order of the input.
    """
    if len(lengths) == 1:
        return _ALONE
    if most_rows is None:
        return [(position,) for position in range(len(lengths))]
    places: list[list[int]] = []
    room = padding = 0
    for position in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        if room:
            padding += lengths[places[-1][0]] - lengths[position]
            if padding <= _MOST_PADDING:
                places[-1].append(position)
                room -= 1
                continue
        places.append([position])
        room, padding = most_rows(lengths[position]) - 1, 0
    return places


def unpack(places: Iterable[Iterable[int]], results: Iterable[Iterable[ResultT]]) -> list[ResultT]:
    """Returns the results in the order of the input, from the positions and results of each place."""
    pairs = zip(chain.from_iterable(places), chain.from_iterable(results), strict=True)
    return [result for _, result in sorted(pairs, key=itemgetter(0))]
