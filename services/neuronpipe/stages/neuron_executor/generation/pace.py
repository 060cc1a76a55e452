"""The pace of a model's steps: limits the prompt tokens of a step, and estimates how long new prompts wait."""

from neuronpipe.stages.neuron_executor.forecast import BatchTime

# A step with tokens of prompts takes at most this multiple of a step without prompts, while texts are being answered.
# The multiple grows with the number of texts that wait for a first token, relative to texts that wait for a next token.
_LONGER, _MOST_LONGER = 2, 4
# After this number of consecutive steps with prompts, one step has none, so that the time of a step without prompts
# stays known. That time depends on the number of texts.
_MOST_READING = 16
# The weight of a new value in each mean.
_NEW = 0.2


class Pace:
    """Means of recent measurements of one model. `part_tokens`: the least tokens of a prompt that a step reads."""

    def __init__(self, part_tokens: int) -> None:
        self.part_tokens = part_tokens
        self._answering_s = 0.0
        self._answering = BatchTime()
        self._reading_steps = 0
        self._reading_s = self._read_tokens = 0.0
        self._text_s = 0.0

    @property
    def overhead_rows(self) -> float:
        """The number of rows that take as long as what every step takes; infinite if that is not known."""
        return self._answering.overhead_tokens

    def note_step(self, read_tokens: int, answered: int, took_s: float) -> None:
        """Notes the time of a step that read `read_tokens` of prompts, and computed `answered` rows of other texts."""
        if not read_tokens:
            self._answering_s = mean(self._answering_s, took_s)
            self._answering.observe(answered, took_s)
            self._reading_steps = 0
        else:
            self._reading_steps += 1
            # Time and tokens get the same weight, so that a short prompt does not count as much as a long prompt.
            reading_s = max(0.0, took_s - self._answering_s) if answered else took_s
            self._reading_s = mean(self._reading_s, reading_s)
            self._read_tokens = mean(self._read_tokens, read_tokens)

    def note_text(self, took_s: float) -> None:
        """Notes a complete text. `took_s`: time since its first step began."""
        self._text_s = mean(self._text_s, took_s)

    def most_read_tokens(self, answered: int, unread: int) -> float:
        """Returns the most prompt tokens of a step with `answered` texts. `unread`: texts without a first token."""
        if not self._reading_s or not self._answering_s:
            return float("inf")
        if self._reading_steps >= _MOST_READING:
            return 0
        longer = min(max(_LONGER, 1 + unread / answered), _MOST_LONGER)
        room_s = (longer - 1) * self._answering_s
        return max(self.part_tokens, room_s * self._read_tokens / self._reading_s)

    def wait_s(self, texts: int, places: int, text_s: float = 0.0) -> float:
        """Estimates how long the last of `texts` waits for its first step, if `places` of them run side by side.

        `text_s`: the time of one of these texts, if it is known; otherwise the mean of all texts counts.
        """
        return max(0, texts - places) * (text_s or self._text_s) / places


def mean(before: float, value: float) -> float:
    """Returns a mean of recent values after a new value. `before`: the mean until now, 0 before the first value."""
    return before + _NEW * (value - before) if before else value
