"""The steps in which a server ends a connection without losing a call: phases, times and limits, without I/O."""

import math
from dataclasses import dataclass
from enum import IntEnum

# Callers begin calls when they get answers, and gRPC without retries fails calls that begin while the notice arrives.
# So the server holds answers from HOLD_S before the notice until HOLD_S after its acknowledgement, or longer if the
# round trip was longer. It holds them for at most MAX_HOLD_S after the notice.
HOLD_S, MAX_HOLD_S = 0.02, 0.1
# If a peer does not acknowledge the notice within this time, the server takes no more streams. It answers open streams.
_NOTICE_LIMIT_S = 5.0
# After the acknowledgement, and after each later stream, the server waits for more streams: for this time, or for this
# number of round trips if they take longer. A caller's library may acknowledge the notice before its calls know it.
# Node.js opens streams for some milliseconds more, or longer while its process gets no processor, and its gRPC client
# repeats a refused call only once.
_DRAIN_S, _DRAIN_ROUND_TRIPS = 0.2, 4
# The server asks a new connection to leave after its first call, or after this time. gRPC fails the calls for which it
# made a connection if the notice comes before they begin.
_FIRST_CALL_S = 0.25


class Phase(IntEnum):
    """The phases of a connection, in their order."""

    OPEN = 0
    # The server gives the notice within HOLD_S.
    NOTICE_DUE = 1
    # The caller got a GOAWAY that leaves it all its streams, and a ping.
    NOTICE_GIVEN = 2
    # The ping came back: the caller knows of the notice, but its streams may still be on their way.
    ACKNOWLEDGED = 3
    # The caller got a GOAWAY that takes no more streams. The connection ends with its last stream.
    GOING_AWAY = 4


@dataclass(slots=True, eq=False)
class Leaving:
    """The phase of a connection, and the times at which the server acts next.

    - `next_s`: time of the next action, on the loop's clock: the notice in phase OPEN, the final GOAWAY later.
    - `ends_s`: time at which the connection is aborted, with all its streams. Both times are infinite while
      nothing is due.
    - `holds_answers`: answers are kept back around the notice.
    - `has_served`: a call on this connection has ended.
    """

    phase: Phase = Phase.OPEN
    next_s: float = math.inf
    ends_s: float = math.inf
    has_served: bool = False
    holds_answers: bool = False
    _notice_s: float = 0.0
    _drain_s: float = 0.0

    @property
    def is_asked(self) -> bool:
        """Whether the notice is due in a connection that is still open."""
        return self.phase is Phase.OPEN and self.next_s < math.inf

    def ask(self, made_s: float) -> None:
        """Makes the notice due: at once, or `_FIRST_CALL_S` after `made_s` if no call has ended yet."""
        self.next_s = 0.0 if self.has_served else made_s + _FIRST_CALL_S

    def prepare_notice(self, now_s: float, *, can_hold: bool) -> None:
        """Begins to leave. `can_hold`: whether answers can be kept back, because no frame is half sent."""
        self.phase, self.holds_answers = Phase.NOTICE_DUE, can_hold
        self.next_s = now_s + HOLD_S + _NOTICE_LIMIT_S

    def note_notice(self, now_s: float) -> None:
        """Records that the notice was given."""
        self.phase, self._notice_s = Phase.NOTICE_GIVEN, now_s

    def acknowledge(self, now_s: float) -> float:
        """Records that the caller acknowledged the notice. Returns the seconds for which answers are still held."""
        round_trip_s = now_s - self._notice_s
        self.phase, self._drain_s = Phase.ACKNOWLEDGED, max(_DRAIN_S, _DRAIN_ROUND_TRIPS * round_trip_s)
        self.postpone(now_s)
        return max(HOLD_S, round_trip_s)

    def postpone(self, now_s: float) -> None:
        """Waits for more streams after the acknowledgement."""
        self.next_s = min(now_s + self._drain_s, self._notice_s + _NOTICE_LIMIT_S)

    def go_away(self) -> None:
        """Records that no more streams are taken."""
        self.phase, self.next_s, self.holds_answers = Phase.GOING_AWAY, math.inf, False
