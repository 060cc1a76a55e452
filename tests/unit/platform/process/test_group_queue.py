"""platform/process/group_queue.py: the items of one group do not hold up those of another."""

import pytest

from neuronpipe.platform.process.group_queue import GroupQueue


def _queue(items: str) -> GroupQueue[str]:
    """Items such as a1, each in the group that is its first letter."""
    queue: GroupQueue[str] = GroupQueue()
    for item in items.split():
        queue.put(item[0], item)
    return queue


def _taken(queue: GroupQueue[str]) -> list[str]:
    found = []
    while queue:
        first = queue.first()
        found.append(queue.take())
        assert found[-1] == first
    return found


def test_groups_take_turns_and_a_group_keeps_its_order() -> None:
    queue = _queue("a1 a2 a3 a4 b1 b2 c1")
    assert len(queue) == 7
    assert _taken(queue) == ["a1", "b1", "c1", "a2", "b2", "a3", "a4"]
    assert len(queue) == 0


def test_a_group_that_comes_again_is_behind_those_that_wait() -> None:
    queue = _queue("a1 b1")
    assert queue.take() == "a1"
    queue.put("a", "a2")
    assert _taken(queue) == ["b1", "a2"]


def test_what_is_discarded_is_gone_and_the_rest_stays() -> None:
    queue = _queue("a1 b1 b2")
    for _ in range(2):
        queue.discard("a", "a1")
        queue.discard("b", "b1")
    queue.discard("c", "c1")
    assert [*queue] == ["b2"]
    assert len(queue) == 1
    assert _taken(queue) == ["b2"]
    with pytest.raises(StopIteration):
        queue.take()
