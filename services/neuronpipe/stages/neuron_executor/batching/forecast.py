"""Forecasts how long a model's batches take, and how long the work before them on the device takes."""

import time
from collections.abc import Collection

from neuronpipe.stages.neuron_executor.batching.batch_time import BatchTimes
from neuronpipe.stages.neuron_executor.batching.queue import SequenceQueue
from neuronpipe.stages.neuron_executor.cores import Cores

# After this time without a batch, the batch time is measured again. Otherwise a machine that was slow for a while would
# refuse every deadline for ever.
_ESTIMATE_LIFE_S = 1.0


class Forecast:
    """The forecast of one model. Times are those of a core: from when it is free for a batch to the batch's end."""

    def __init__(
        self, queue: SequenceQueue, cores: Cores, times: BatchTimes, on_device: Collection["Forecast"]
    ) -> None:
        """`on_device`: the forecasts of all models of the device."""
        self._queue = queue
        self._cores = cores
        self._batch_time = times.beside
        self._lone_batch_time = times.alone
        self._on_device = on_device
        self._last_batch_s = time.monotonic()

    @property
    def overhead_tokens(self) -> float:
        """The number of tokens that take as long as a batch's overhead."""
        return self._batch_time.overhead_tokens

    def observe(self, computed_tokens: int, seconds: float, *, is_alone: bool) -> None:
        """Adds the time of a batch that has run."""
        self._last_batch_s = time.monotonic()
        (self._lone_batch_time if is_alone else self._batch_time).observe(computed_tokens, seconds)

    def batch_s(self, computed_tokens: int) -> float:
        """The time of a batch while others run; 0 if not known."""
        return self._batch_time.seconds(computed_tokens)

    def alone_s(self, computed_tokens: int) -> float:
        """The time of the next batch if it has this few tokens, as far as known."""
        is_idle = not self._cores.running
        if is_idle and self._is_outdated():
            return 0.0
        is_alone = is_idle and not any(len(one._queue) for one in self._on_device)
        return (self._lone_batch_time if is_alone else self._batch_time).seconds(computed_tokens)

    def together_s(self, padded_tokens: int) -> float:
        """The least time for which a number of tokens keeps all cores busy, as far as known."""
        is_known = self._cores.running or not self._is_outdated()
        return padded_tokens * self._batch_time.token_s / max(1, self._cores.left) if is_known else 0.0

    def work_s(self) -> float:
        """The least time for which this model's waiting sequences keep all cores busy; 0 if not known."""
        return self._queue.tokens_before(is_bulk=True) * self._batch_time.token_s / max(1, self._cores.left)

    def queue_s(self, *, is_bulk: bool) -> float:
        """The least time that a new sequence waits.

        It is the time for which the waiting sequences of all models, and running batches of other models, keep the
        cores busy. A core computes one batch at a time, however many it has been given, and batch times are counted
        accordingly.
        """
        waiting_s = sum(one._queue.tokens_before(is_bulk=is_bulk) * one._batch_time.token_s for one in self._on_device)
        others_s = self._cores.busy_with_others_s(self) if len(self._on_device) > 1 else 0.0
        return others_s + waiting_s / max(1, self._cores.left)

    def _is_outdated(self) -> bool:
        return time.monotonic() >= self._last_batch_s + _ESTIMATE_LIFE_S
