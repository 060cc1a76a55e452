"""Which bucket computes most."""

from collections.abc import Callable, Sequence

from neuronpipe.core.buckets import Bucket


def best_bucket(buckets: Sequence[Bucket], waiting: Sequence[tuple[int, int]], seconds: Callable[[int], float], room_s: float) -> Bucket:
    """The bucket that does most work a second with what waits; of equals the one that computes the fewest tokens.

    `waiting`: padded lengths and how many sequences there are of each, in the order in which they would be taken; the bucket must hold the
    first. `seconds`: how long so many tokens take; 0 where nothing is known, and then most rows are filled. Buckets that would take longer
    than `room_s` do not count, but for the smallest.

    A bucket takes its time however many of its rows are used. A sequence is worth what it would cost in the bucket that is best for those
    of its length alone: so rows filled with short sequences do not make a long bucket worth its time.
    """
    timed = [(bucket, seconds(bucket.padded_tokens)) for bucket in buckets]
    fitting = [one for one in timed if one[0].tokens >= waiting[0][0]]
    in_time = [one for one in fitting if one[1] < room_s] or [min(fitting, key=lambda one: one[0].padded_tokens)]
    if len(in_time) == 1:
        return in_time[0][0]
    worth = {
        length: min((time_s or 1) / min(bucket.batch, count) for bucket, time_s in timed if bucket.tokens >= length)
        for length, count in waiting
    }

    def order(one: tuple[Bucket, float]) -> tuple[float, int]:
        bucket, time_s = one
        room, work_s = bucket.batch, 0.0
        for length, count in waiting:
            if length <= bucket.tokens:
                rows = min(room, count)
                work_s += rows * worth[length]
                room -= rows
        return round(work_s / (time_s or 1), 9), -bucket.padded_tokens

    return max(in_time, key=order)[0]
