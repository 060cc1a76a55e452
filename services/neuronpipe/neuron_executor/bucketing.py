"""How many sequences make the best use of a bucket."""

from collections.abc import Callable, Sequence


def best_batch(batches: Sequence[int], waiting: int, seconds: Callable[[int], float], room_s: float) -> int:
    """The batch size, of those compiled, that computes most sequences a second where so many wait; the smallest of equals.

    A bucket takes its time however many of its rows are used. Sizes that would take longer than `room_s` do not count, but for the
    smallest. `batches`: ascending; `seconds`: how long a batch of such a size takes.
    """
    in_time = [batch for batch in batches if seconds(batch) < room_s] or batches[:1]
    # Where nothing is known, the bucket with the fewest empty rows.
    return max(in_time, key=lambda batch: (min(batch, waiting) / (seconds(batch) or 1), -batch))
