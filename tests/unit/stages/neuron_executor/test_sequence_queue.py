"""stages/neuron_executor/sequence_queue.py: who goes first, and what stays of sequences that left."""

import random

from neuronpipe.core.errors import DeadlineExceeded
from neuronpipe.stages.neuron_executor.sequence_queue import ComputedSequence, QueuedSequence, SequenceQueue
from tests.unit.stages.neuron_executor.conftest import Push


def _drain(queue: SequenceQueue) -> list[QueuedSequence]:
    drained = []
    while one := queue.oldest():
        queue.remove(one)
        drained.append(one)
    return drained


async def test_the_oldest_goes_first_whatever_its_length_and_deadline(queue: SequenceQueue, push: Push) -> None:
    last, first, middle = push(3, deadline_s=10), push(1, padded_tokens=9), push(2, padded_tokens=1, deadline_s=20)
    assert _drain(queue) == [first, middle, last]


async def test_of_the_same_age_the_earliest_deadline_goes_first(queue: SequenceQueue, push: Push) -> None:
    none, late, early = push(), push(deadline_s=20, padded_tokens=9), push(deadline_s=10)
    assert _drain(queue) == [early, late, none]


async def test_of_the_same_age_and_deadline_the_first_to_come_goes_first(queue: SequenceQueue, push: Push) -> None:
    pushed = [push(padded_tokens=tokens) for tokens in (4, 9, 1, 4)]
    assert _drain(queue) == pushed


async def test_interactive_sequences_go_before_older_bulk(queue: SequenceQueue, push: Push) -> None:
    bulk, interactive = push(1, is_bulk=True), push(2)
    assert _drain(queue) == [interactive, bulk]


async def test_tenants_beyond_their_share_wait_for_others_of_their_priority(queue: SequenceQueue, push: Push) -> None:
    bulk, beyond, within = push(1, is_bulk=True), push(2, is_beyond_share=True), push(3)
    assert _drain(queue) == [within, beyond, bulk]


async def test_a_batch_is_filled_with_what_is_beyond_a_share(queue: SequenceQueue, push: Push) -> None:
    push(1, is_beyond_share=True)
    push(2)
    assert queue.count_places(4, is_bulk=False) == 2


async def test_the_oldest_of_a_length_and_priority_is_its_first(queue: SequenceQueue, push: Push) -> None:
    push(1, padded_tokens=9)
    push(1, is_bulk=True)
    younger, older = push(3), push(2)
    assert queue.first(4, is_bulk=False) is older
    assert younger is not older


async def test_a_length_of_which_none_waits_has_no_first(queue: SequenceQueue, push: Push) -> None:
    push(padded_tokens=9)
    push(padded_tokens=4, is_bulk=True)
    assert queue.first(4, is_bulk=False) is None


async def test_near_lengths_come_nearest_first_and_if_equal_the_shorter(queue: SequenceQueue, push: Push) -> None:
    for tokens in (16, 2, 12, 8, 9, 4):
        push(padded_tokens=tokens)
    assert queue.nearest_lengths(8, is_bulk=False) == [8, 9, 4, 12, 2, 16]


async def test_near_lengths_are_those_of_one_priority_that_still_wait(queue: SequenceQueue, push: Push) -> None:
    gone = push(padded_tokens=4)
    push(padded_tokens=6)
    push(padded_tokens=5, is_bulk=True)
    queue.remove(gone)
    assert queue.nearest_lengths(4, is_bulk=False) == [6]


async def test_what_goes_before_bulk_is_all_and_before_interactive_work_only_its_own_kind(
    queue: SequenceQueue, push: Push
) -> None:
    push(padded_tokens=4)
    push(padded_tokens=16, is_bulk=True)
    assert [queue.tokens_before(is_bulk=is_bulk) for is_bulk in (False, True)] == [4, 20]


async def test_length_and_tokens_follow_what_is_pushed_and_popped(queue: SequenceQueue, push: Push) -> None:
    for tokens, is_bulk in (4, False), (9, False), (16, True):
        push(padded_tokens=tokens, is_bulk=is_bulk)
    seen = []
    while one := queue.oldest():
        seen.append((len(queue), queue.tokens_before(is_bulk=False), queue.tokens_before(is_bulk=True)))
        queue.remove(one)
    assert seen == [(3, 13, 29), (2, 9, 25), (1, 0, 16)]
    assert (len(queue), queue.tokens_before(is_bulk=True)) == (0, 0)


async def test_what_nobody_waits_for_is_dropped_and_no_longer_counted(queue: SequenceQueue, push: Push) -> None:
    kept = [push(padded_tokens=5), push(padded_tokens=9), push(padded_tokens=7, is_bulk=True)]
    for left in push(padded_tokens=5), push(padded_tokens=7, is_bulk=True):
        left.future.cancel()
        queue.forget(left)
    push(padded_tokens=9, deadline_s=0)
    queue.expire_late()
    assert (len(queue), queue.tokens_before(is_bulk=False), queue.tokens_before(is_bulk=True)) == (3, 14, 21)
    assert _drain(queue) == kept


async def test_who_is_dropped_for_its_deadline_is_told_so(queue: SequenceQueue, push: Push) -> None:
    late = push(deadline_s=0)
    queue.expire_late()
    assert isinstance(late.future.exception(), DeadlineExceeded)


async def test_a_caller_who_got_an_answer_is_told_nothing_more(push: Push) -> None:
    answered = push(deadline_s=0)
    answer = [ComputedSequence({}, 0, 1, 1, 4)]
    answered.future.set_result(answer)
    assert answered.expire_if_late(0)
    assert answered.future.result() is answer


async def test_what_is_forgotten_keeps_nothing_alive_and_is_forgotten_once(queue: SequenceQueue, push: Push) -> None:
    forgotten, kept = push(1), push(2)
    for _ in range(2):
        queue.forget(forgotten)
    assert not forgotten.inputs
    assert (len(queue), queue.tokens_before(is_bulk=False), queue.count_places(4, is_bulk=False)) == (1, 4, 1)
    assert (queue.oldest(), queue.first(4, is_bulk=False), list(queue)) == (kept, kept, [kept])


async def test_what_runs_already_keeps_its_arrays_where_its_caller_leaves(queue: SequenceQueue, push: Push) -> None:
    running = push()
    queue.remove(running)
    queue.forget(running)
    assert [list(arrays) for arrays in running.inputs] == [["input_ids"]]


async def test_however_many_come_and_leave_a_bounded_number_of_entries_stays(queue: SequenceQueue, push: Push) -> None:
    push(0)  # what is in front of them stays
    staying = [push(number) for number in range(1, 11)]
    for number in range(11, 10_000):
        queue.forget(push(number))
    (heap,) = queue._heaps[False].values()
    assert len(heap.entries) <= 2 * 16 + 2
    assert _drain(queue)[1:] == staying


async def test_a_random_order_of_coming_and_leaving_keeps_order_and_counts(queue: SequenceQueue, push: Push) -> None:
    seed = 20261122
    generator, waiting = random.Random(seed), list[QueuedSequence]()
    for _ in range(3000):
        if not waiting or generator.random() < 0.55:
            waiting.append(
                push(generator.random(), padded_tokens=generator.choice((4, 8)), is_bulk=generator.random() < 0.3)
            )
        else:
            queue.forget(waiting.pop(generator.randrange(len(waiting))))
        assert len(queue) == len(waiting)
    assert queue.tokens_before(is_bulk=True) == sum(one.padded_tokens for one in waiting), f"seed {seed}"
    assert _drain(queue) == sorted(waiting, key=lambda one: (one.is_bulk, one.rank.arrived_s)), f"seed {seed}"
