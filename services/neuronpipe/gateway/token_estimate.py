"""What an input costs, before it is tokenized."""

# Tokens in a byte of input before anything is known, and the weight of the newest request in the estimate.
_TOKENS_PER_BYTE = 0.25
_MAX_TOKENS_PER_BYTE = 1.0
_ESTIMATE_WEIGHT = 0.05


class TokenEstimate:
    """Tokens of inputs by their bytes, as those before them had."""

    def __init__(self) -> None:
        self._tokens_per_byte = _TOKENS_PER_BYTE

    def of(self, input_bytes: int) -> int:
        """The tokens of an input of so many bytes; at least one."""
        return max(1, round(input_bytes * self._tokens_per_byte))

    def learn(self, input_bytes: int, tokens: int) -> None:
        """An input of so many bytes had so many tokens."""
        # A long context in many overlapping windows says nothing about others.
        tokens_per_byte = min(_MAX_TOKENS_PER_BYTE, tokens / max(1, input_bytes))
        self._tokens_per_byte += _ESTIMATE_WEIGHT * (tokens_per_byte - self._tokens_per_byte)
