"""What the steps of a model and its texts took: how much of a prompt a step may have, and how long new prompts wait."""

# A step beside texts that are being answered takes this many times the time of one without a prompt: more where more
# texts wait for their first token than would wait for the next one.
_LONGER, _MOST_LONGER = 2, 4
# After so many steps with prompts in a row there is one without: what such a step takes depends on how many texts there
# are, and is not known otherwise where prompts come all the time.
_MOST_READING = 16
# The weight of what is new in each mean.
_NEW = 0.2


class Pace:
    """Means of what one model measured lately. `part_tokens`: the least of a prompt in a step, so that it is read."""

    def __init__(self, part_tokens: int) -> None:
        self.part_tokens = part_tokens
        self._answering_s = 0.0
        self._reading_steps = 0
        self._reading_s = self._read_tokens = 0.0
        self._text_s = 0.0

    def note_step(self, read_tokens: int, answered: int, took_s: float) -> None:
        """A step has read so many tokens of prompts, beside so many texts that were being answered."""
        if not read_tokens:
            self._answering_s = _mean(self._answering_s, took_s)
            self._reading_steps = 0
        else:
            self._reading_steps += 1
            # Both with the same weights, so that a short prompt does not count as much as a long one.
            reading_s = max(0.0, took_s - self._answering_s) if answered else took_s
            self._reading_s = _mean(self._reading_s, reading_s)
            self._read_tokens = _mean(self._read_tokens, read_tokens)

    def note_text(self, took_s: float) -> None:
        """A text was complete so long after its first step began."""
        self._text_s = _mean(self._text_s, took_s)

    def most_read_tokens(self, answered: int, unread: int) -> float:
        """The tokens of prompts that a step may have beside `answered` texts, while `unread` wait for a first token."""
        if not self._reading_s or not self._answering_s:
            return float("inf")
        if self._reading_steps >= _MOST_READING:
            return 0
        longer = min(max(_LONGER, 1 + unread / answered), _MOST_LONGER)
        room_s = (longer - 1) * self._answering_s
        return max(self.part_tokens, room_s * self._read_tokens / self._reading_s)

    def wait_s(self, texts: int, places: int) -> float:
        """How long the last of these texts waits for its first step, if so many run side by side."""
        return max(0, texts - places) * self._text_s / places


def _mean(before: float, value: float) -> float:
    return before + _NEW * (value - before) if before else value
