"""The time for which something lasts, without the time in which this process stands still."""

# Looks within a limit. A hang is found up to a fifth of the limit late.
_LOOKS = 10
# A look that comes later than this shows that the process stood still (SIGSTOP, a paused virtual machine).
_STANDSTILL_S = 0.25


class RunningTime:
    """The time for which a subject, such as a batch, has lasted while this process ran.

    A standstill of the process is no time that a core or a peer had: the answer may wait to be read. So the owner looks
    every `look_s` seconds, and a look that comes late adds no time.
    """

    __slots__ = ("_looked_s", "_passed_s", "_subject", "look_s")

    def __init__(self, limit_s: float) -> None:
        """`limit_s`: the time that the owner allows a subject."""
        self.look_s = limit_s / _LOOKS
        self._subject: object = None
        self._looked_s = self._passed_s = 0.0

    def look(self, subject: object, now_s: float) -> float:
        """Returns the time since the first look at a subject. None is no subject: its time is 0."""
        since_s, self._looked_s = now_s - self._looked_s, now_s
        if subject is None or subject != self._subject:
            self._subject, self._passed_s = subject, 0.0
        elif since_s <= self.look_s + _STANDSTILL_S:
            self._passed_s += since_s
        return self._passed_s
