"""How long a model's batches will take, and what on its device goes before them."""

import time
from collections.abc import Collection

from neuronpipe.neuron_executor.batching.batch_time import BatchTimes
from neuronpipe.neuron_executor.batching.queue import SequenceQueue
from neuronpipe.neuron_executor.cores import Cores

# Where no batch runs or has run for so long, how long one takes is to be found out again: or a machine that was slow for a while would
# refuse every deadline for ever.
_ESTIMATE_LIFE_S = 1.0


class Forecast:
    """One model's. Times are those of a core: from when it is free for a batch to the batch's end."""

    def __init__(self, queue: SequenceQueue, cores: Cores, times: BatchTimes, on_device: Collection["Forecast"]) -> None:
        """`on_device`: those of all its models."""
        self._queue = queue
        self._cores = cores
        self._batch_time = times.beside
        self._lone_batch_time = times.alone
        self._on_device = on_device
        self._last_batch_s = time.monotonic()

    @property
    def overhead_tokens(self) -> float:
        """How many tokens take as long as a batch's overhead."""
        return self._batch_time.overhead_tokens

    def observe(self, computed_tokens: int, seconds: float, *, is_alone: bool) -> None:
        """A batch has run."""
        self._last_batch_s = time.monotonic()
        (self._lone_batch_time if is_alone else self._batch_time).observe(computed_tokens, seconds)

    def batch_s(self, computed_tokens: int) -> float:
        """How long a batch takes beside others; 0 where nothing is known."""
        return self._batch_time.seconds(computed_tokens)

    def alone_s(self, computed_tokens: int) -> float:
        """How long the next batch takes if it computes so little, as far as is known."""
        is_idle = not self._cores.running
        if is_idle and self._is_outdated():
            return 0.0
        is_alone = is_idle and not any(len(one._queue) for one in self._on_device)
        return (self._lone_batch_time if is_alone else self._batch_time).seconds(computed_tokens)

    def together_s(self, padded_tokens: int) -> float:
        """How long so many tokens keep all cores busy at least, as far as is known."""
        is_known = self._cores.running or not self._is_outdated()
        return padded_tokens * self._batch_time.token_s / max(1, self._cores.left) if is_known else 0.0

    def queue_s(self, *, is_bulk: bool) -> float:
        """How long what waits for any model, and batches of others that run, keep the cores busy: a new sequence waits at least so long.

        However many batches a core is handed, it computes one at a time, and a batch's time is counted so.
        """
        waiting_s = sum(one._queue.tokens_before(is_bulk=is_bulk) * one._batch_time.token_s for one in self._on_device)
        others_s = self._cores.busy_with_others_s(self) if len(self._on_device) > 1 else 0.0
        return others_s + waiting_s / max(1, self._cores.left)

    def _is_outdated(self) -> bool:
        return time.monotonic() >= self._last_batch_s + _ESTIMATE_LIFE_S
