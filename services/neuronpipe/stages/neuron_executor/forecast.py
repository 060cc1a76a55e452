"""Forecasts when a model's next sequence is computed, from the queue of waiting sequences and the time of batches."""

import math
import time
from collections.abc import Collection
from dataclasses import dataclass

from neuronpipe.stages.neuron_executor.cores import Cores
from neuronpipe.stages.neuron_executor.sequence_queue import SequenceQueue

# The factor of the weight of older batches at each new batch: the estimate follows about the last 50 batches.
_DECAY = 0.98
# A measurement of the warm-up begins with the first weight. Each batch multiplies the weight by _WARM_UP_DECAY, down to
# the second weight. It decays more slowly than batches (_DECAY), because if all load has one length, only the warm-up
# separates overhead and cost per token.
_WARM_UP_WEIGHT, _LEAST_WARM_UP_WEIGHT, _WARM_UP_DECAY = 2.0, 0.02, 0.99
# The lower bound of the overhead, so that noise does not keep sequences apart.
_MIN_OVERHEAD_TOKENS = 4.0
# The lower bound of the assumed relative error of estimates.
_MIN_RELATIVE_ERROR = 0.05
# A batch counts as at most this multiple of its forecast, so that a stall (a paused machine, a new kernel) is soon
# forgotten. The estimate still follows a machine that became slower, because the forecast grows with every batch.
_MAX_SURPRISE = 3.0


class BatchTime:
    """Models the time of a batch as an overhead plus a cost per padded token.

    Overhead and cost come from a least-squares fit with exponential decay. On a CPU with two cores, a batch of MiniLM
    in float32 takes 2.7 ms plus 0.26 ms per token (measured 2026-11-21).
    """

    def __init__(self) -> None:
        self._warm_up = _Sums()
        self._batches = _Sums()
        self._relative_error = 0.2
        self._overhead_s = 0.0
        # The seconds of a padded token; 0 if not known.
        self.token_s = 0.0

    def anchor(self, tokens: int, seconds: float) -> None:
        """Adds a batch of the warm-up."""
        self._warm_up.add(tokens, seconds, _WARM_UP_WEIGHT)
        self._fit()

    def observe(self, tokens: int, seconds: float) -> None:
        """Adds a batch of sequences."""
        if expected := self._overhead_s + self.token_s * tokens:
            seconds = min(seconds, _MAX_SURPRISE * expected)
            error = min(1.0, abs(seconds - expected) / expected)
            self._relative_error += (1 - _DECAY) * (error - self._relative_error)
        self._batches.fade(_DECAY)
        self._batches.add(tokens, seconds, 1.0)
        if self._warm_up.weight > _LEAST_WARM_UP_WEIGHT:
            self._warm_up.fade(_WARM_UP_DECAY)
        self._fit()

    def seconds(self, tokens: int) -> float:
        """Returns the likely upper bound of a batch's time: the estimate plus twice its usual error."""
        return (self._overhead_s + self.token_s * tokens) * (1 + 2 * max(_MIN_RELATIVE_ERROR, self._relative_error))

    @property
    def overhead_tokens(self) -> float:
        """Number of tokens that take as long as a batch's overhead; infinite if the cost of a token is not known."""
        return max(_MIN_OVERHEAD_TOKENS, self._overhead_s / self.token_s) if self.token_s else math.inf

    def _fit(self) -> None:
        warm_up, batches = self._warm_up, self._batches
        weight, x, y = warm_up.weight + batches.weight, warm_up.x + batches.x, warm_up.y + batches.y
        xx, xy = warm_up.xx + batches.xx, warm_up.xy + batches.xy
        spread = weight * xx - x * x
        slope = (weight * xy - x * y) / spread if spread > 1e-9 * weight * xx else 0.0
        # Neither cost can be negative, despite noise.
        self.token_s = min(max(0.0, slope), y / x)
        self._overhead_s = max(0.0, (y - self.token_s * x) / weight)


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """The time of a batch while other batches run, and while the other cores are idle. With one core both are equal."""

    shared: BatchTime
    alone: BatchTime


class _Sums:
    """The weighted sums for a least-squares fit of y to x."""

    __slots__ = ("weight", "x", "xx", "xy", "y")

    def __init__(self) -> None:
        self.weight = self.x = self.y = self.xx = self.xy = 0.0

    def fade(self, share: float) -> None:
        self.weight *= share
        self.x *= share
        self.y *= share
        self.xx *= share
        self.xy *= share

    def add(self, x: float, y: float, weight: float) -> None:
        self.weight += weight
        self.x += weight * x
        self.y += weight * y
        self.xx += weight * x * x
        self.xy += weight * x * y


# The batch time is measured again after this time without a batch, or after this multiple of the time of a batch.
# Otherwise a machine that was slow for a while would refuse every deadline for ever. A caller that is always late takes
# at most one twentieth of a core.
_ESTIMATE_LIFE_S, _ESTIMATE_LIFE_BATCHES = 1.0, 20.0


class Forecast:
    """The forecast of one model. A batch lasts from the moment when a core is free for the batch until it has ended."""

    def __init__(
        self, queue: SequenceQueue, cores: Cores, times: BatchTimes, on_device: Collection["Forecast"]
    ) -> None:
        """`on_device`: the forecasts of all models of the device."""
        self.queue = queue
        self._cores = cores
        self._shared_time = times.shared
        self._alone_time = times.alone
        self._on_device = on_device
        self._outdated_at_s = time.monotonic() + _ESTIMATE_LIFE_S

    @property
    def overhead_tokens(self) -> float:
        return self._shared_time.overhead_tokens

    def observe(self, computed_tokens: int, seconds: float, *, is_alone: bool) -> None:
        self._outdated_at_s = time.monotonic() + max(_ESTIMATE_LIFE_S, _ESTIMATE_LIFE_BATCHES * seconds)
        (self._alone_time if is_alone else self._shared_time).observe(computed_tokens, seconds)

    def batch_s(self, computed_tokens: int) -> float:
        """Estimates the time of a batch while others run; 0 if not known."""
        return self._shared_time.seconds(computed_tokens)

    def next_batch_s(self, computed_tokens: int) -> float:
        """Estimates the time of the next batch if it has this number of tokens; 0 if not known."""
        if self._cores.running:
            return self._shared_time.seconds(computed_tokens)
        if self._is_outdated():
            return 0.0
        for forecast in self._on_device:
            if len(forecast.queue):
                return self._shared_time.seconds(computed_tokens)
        return self._alone_time.seconds(computed_tokens)

    def all_cores_s(self, padded_tokens: int) -> float:
        """Returns the least time for which a number of tokens keeps all cores busy; 0 if not known."""
        is_known = self._cores.running or not self._is_outdated()
        return padded_tokens * self._shared_time.token_s / max(1, self._cores.left) if is_known else 0.0

    def backlog_s(self) -> float:
        """Returns the least time for which this model's waiting sequences keep all cores busy; 0 if not known."""
        return self.waiting_s(is_bulk=True) / max(1, self._cores.left)

    def waiting_s(self, *, is_bulk: bool) -> float:
        """Returns the time of one core for the model's sequences that go before a new sequence; 0 if not known."""
        return self.queue.tokens_before(is_bulk=is_bulk) * self._shared_time.token_s

    def queue_wait_s(self, *, is_bulk: bool) -> float:
        """Returns the least time that a new sequence waits.

        The waiting sequences of all models, and running batches of other models, keep the cores busy for this time. A
        core that has been given several batches computes them one after another, so their times add up.
        """
        waiting_s = sum(forecast.waiting_s(is_bulk=is_bulk) for forecast in self._on_device)
        others_s = self._cores.busy_with_others_s(self) if len(self._on_device) > 1 else 0.0
        return others_s + waiting_s / max(1, self._cores.left)

    def _is_outdated(self) -> bool:
        return time.monotonic() >= self._outdated_at_s
