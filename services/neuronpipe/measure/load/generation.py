"""The part of a load test's request that is about generated texts."""

from dataclasses import dataclass

from neuronpipe.core.errors import SetupError
from neuronpipe.measure.load.lengths import MAX_TOKENS, Lengths

MAX_LIMIT_MS = 3_600_000
# As the gateway has it (tasks/decoding_checks.py).
MAX_BEAMS = 16
OUTPUT_TOKENS = Lengths.fixed(32)
TASKS = ("text_generation", "summarization", "translation")


@dataclass(frozen=True, kw_only=True)
class GenerationLoad:
    """Texts are generated, and read as they come.

    `prompt_tokens` None: the prompts are the texts as they are. `first_token_limit_ms` and `token_limit_ms`: an answer
    beyond them is no goodput. Raises SetupError for a value that is out of range, and names the option.
    """

    prompt_tokens: Lengths | None = None
    output_tokens: Lengths = OUTPUT_TOKENS
    # So many tokens before each prompt are the same in all.
    shared_prefix_tokens: int = 0
    num_beams: int = 1
    first_token_limit_ms: float | None = None
    token_limit_ms: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.shared_prefix_tokens <= MAX_TOKENS:
            raise SetupError(f"--shared-prefix-tokens {self.shared_prefix_tokens}: must be from 0 to {MAX_TOKENS:,}")
        if not 1 <= self.num_beams <= MAX_BEAMS:
            raise SetupError(f"--num-beams {self.num_beams}: must be from 1 to {MAX_BEAMS}")
        for option, limit_ms in (("--ttft-ms", self.first_token_limit_ms), ("--itl-ms", self.token_limit_ms)):
            if limit_ms is not None and not 0 < limit_ms <= MAX_LIMIT_MS:  # false for NaN too
                raise SetupError(f"{option} {limit_ms:g}: must be more than 0 and at most {MAX_LIMIT_MS:,} ms")
