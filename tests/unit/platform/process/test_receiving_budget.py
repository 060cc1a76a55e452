"""platform/process/receiving_budget.py: which claims find room, and which are refused."""

import itertools

from neuronpipe.core.errors import NeuronpipeError
from neuronpipe.platform.process.receiving_budget import Claim, ReceivingBudget

_MESSAGE_BYTES = 1600
_SMALL_BYTES = 200
_BUDGET_BYTES = 2 * _MESSAGE_BYTES
_connections = itertools.count()


class _Message(Claim):
    """A claim that remembers its refusal."""

    __slots__ = ("refusals",)

    def __init__(self, connection: str = "") -> None:
        """`connection`: default one of its own."""
        self.refusals: list[str] = []
        super().__init__(connection or str(next(_connections)), self._refused)

    def _refused(self, error: NeuronpipeError) -> None:
        self.refusals.append(error.message)


def _budget() -> ReceivingBudget:
    return ReceivingBudget(_MESSAGE_BYTES, _BUDGET_BYTES)


def _grown(budget: ReceivingBudget, count: int, to_bytes: int) -> list[_Message]:
    messages = [_Message() for _ in range(count)]
    for message in messages:
        budget.grow(message, to_bytes)
    return messages


def test_a_large_claim_without_room_is_refused_once_and_the_others_stay() -> None:
    budget = _budget()
    first = _grown(budget, 2, _MESSAGE_BYTES)
    (late,) = _grown(budget, 1, _SMALL_BYTES)
    budget.grow(late, _SMALL_BYTES + 1)
    assert late.refusals == ["3200 bytes for messages while they arrive, the limit (max_receiving_bytes)"]
    assert late.bytes == 0
    assert [message.refusals for message in first] == [[], []]


def test_what_has_arrived_leaves_room() -> None:
    budget = _budget()
    for _ in range(5):
        messages = _grown(budget, 2, _MESSAGE_BYTES)
        assert [message.refusals for message in messages] == [[], []]
        for message in messages:
            budget.release(message)


def test_small_claims_have_room_beside_large_ones_and_the_newest_are_preferred() -> None:
    budget = _budget()
    _grown(budget, 2, _MESSAGE_BYTES)
    oldest, *others = _grown(budget, 4, _SMALL_BYTES // 2)
    budget.grow(others[0], _SMALL_BYTES)
    assert others[0].refusals == [
        "3200 bytes for messages while they arrive, the limit (max_receiving_bytes)"
    ]  # as the largest of them
    (newest,) = _grown(budget, 1, 1)
    assert [message.refusals for message in (oldest, *others[1:], newest)] == [[], [], [], []]


def test_the_oldest_small_claim_grows_until_it_is_a_large_one() -> None:
    budget = _budget()
    first, second = _grown(budget, 2, _MESSAGE_BYTES)
    oldest, *others = _grown(budget, 2, _SMALL_BYTES)
    _grown(budget, 5, 50)
    assert (oldest.refusals, [bool(message.refusals) for message in others]) == ([], [True])
    budget.release(second)
    for to_bytes in (2 * _SMALL_BYTES, _MESSAGE_BYTES):
        budget.grow(oldest, to_bytes)
    assert (first.refusals, oldest.refusals, oldest.bytes) == ([], [], _MESSAGE_BYTES)


def test_small_claims_take_what_large_ones_leave_and_yield_to_them() -> None:
    budget = _budget()
    small = _grown(budget, (_BUDGET_BYTES + 2 * _SMALL_BYTES) // _SMALL_BYTES, _SMALL_BYTES)
    assert not any(message.refusals for message in small)
    budget.grow(small[0], _MESSAGE_BYTES)
    refused = [message for message in small if message.refusals]
    assert (small[0].bytes, len(refused)) == (_MESSAGE_BYTES, (_MESSAGE_BYTES - _SMALL_BYTES) // _SMALL_BYTES)


def test_a_connection_gets_half_of_the_budget() -> None:
    budget = _budget()
    first, second, elsewhere = _Message("one"), _Message("one"), _Message("another")
    for message in (first, second, elsewhere):
        budget.grow(message, _MESSAGE_BYTES)
    expected = ["1600 bytes for messages of one connection while they arrive, the limit (half of max_receiving_bytes)"]
    assert second.refusals == expected
    assert (first.refusals, elsewhere.refusals) == ([], [])
    budget.release(first)
    again = _Message("one")
    budget.grow(again, _MESSAGE_BYTES)
    assert again.refusals == []


def test_a_budget_smaller_than_a_message_takes_one() -> None:
    budget = ReceivingBudget(_MESSAGE_BYTES, 1)
    assert _grown(budget, 1, _MESSAGE_BYTES)[0].refusals == []
