"""The frames that a peer may send although they bring nothing, and how many of its own calls it may reset."""

from dataclasses import dataclass

from ngh2 import DenialOfServiceError

# Idle frames bring nothing: PING, SETTINGS, WINDOW_UPDATE, GOAWAY, empty DATA, and RST_STREAM of a call that is over. A
# peer may send a burst of the first number, and then the second number per second. More end the connection.
_IDLE_FRAMES = (500, 100)
# Calls and data pay for more idle frames: gRPC's C core sends two WINDOW_UPDATE for each message that it waits for,
# readers send them for bytes that they have read, and clients measure round trips by PING. Each call, each message and
# each DATA frame of the peer pays for _PAID_FRAMES idle frames, and each 256 bytes that we send for one idle frame. At
# most _MAX_PAID_FRAMES are kept for later.
_PAID_FRAMES, _MAX_PAID_FRAMES = 4, 10_000
_PAID_BITS = 8
# A peer may reset this number of calls per second, or as many as it may have open if that is more, and twice as many
# at once. All calls of a connection may reach their deadlines together, and then the calls that replaced them. Rapid
# resets (CVE-2023-44487) exceed this.
_MIN_RESETS = 2048


@dataclass(slots=True, eq=False)
class Rate:
    """The rate at which a peer sends frames of a kind, as a leaky bucket."""

    burst: float
    per_s: float
    _level: float = 0.0
    _seen_s: float = 0.0

    def count(self, now_s: float) -> None:
        """Counts a frame. Raises DenialOfServiceError if frames flood."""
        self._level = max(0.0, self._level - (now_s - self._seen_s) * self.per_s) + 1
        self._seen_s = now_s
        if self._level > self.burst:
            raise DenialOfServiceError(f"{self.burst} frames, then {self.per_s} a second, the limit")


class FrameBudget:
    """The idle frames of a peer, for which calls and data pay, and `resets`: the rate of its resets of open calls."""

    def __init__(self, max_calls: int) -> None:
        """`max_calls`: calls that the peer may have open."""
        resets = max(max_calls, _MIN_RESETS)
        self.resets = Rate(2 * resets, resets)
        self._idle_frames, self._paid_frames = Rate(*_IDLE_FRAMES), 0

    def pay(self) -> None:
        """Pays for idle frames by a call, a message or a DATA frame."""
        self._paid_frames += _PAID_FRAMES

    def pay_by_bytes(self, sent_bytes: int) -> None:
        """Pays for idle frames by bytes that were sent."""
        self._paid_frames = min(self._paid_frames + (sent_bytes >> _PAID_BITS), _MAX_PAID_FRAMES)

    def count_idle_frame(self, now_s: float) -> None:
        """Counts a frame that brings nothing. Raises DenialOfServiceError if such frames flood."""
        if self._paid_frames:
            self._paid_frames -= 1
        else:
            self._idle_frames.count(now_s)
