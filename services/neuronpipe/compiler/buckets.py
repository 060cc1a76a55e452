"""Chooses the buckets to compile: the buckets that the user names, or the best for the lengths of real inputs."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from neuronpipe.bundles.buckets import Bucket, parse_bucket
from neuronpipe.core.errors import SetupError
from neuronpipe.core.files import read_lines

MAX_LENGTHS = 64
# A token between two special tokens. ModelSpec accepts no smaller limit.
MIN_TOKENS = 3
_MAX_TOKENS = 1 << 16
_MAX_BYTES = 256 << 20
# Counts are added up as float64.
_MAX_DIGITS = 15
# The default number of lengths, and the default batches.
_LENGTHS = 4
_BATCHES = (1, 8)


@dataclass(frozen=True, slots=True)
class BucketRequest:
    """The buckets to compile.

    `buckets`: the option, such as ("8x128",) or ("auto",), which needs `lengths`; () for back ends without buckets.
    With "auto", each of `max_lengths` lengths is compiled for each of `batches`. None means 4 lengths, and batches of 1
    and 8.
    """

    buckets: tuple[str, ...] = ()
    lengths: Path | None = None
    max_lengths: int | None = None
    batches: tuple[int, ...] | None = None

    def check(self) -> None:
        """Raises SetupError if options are about the choice of buckets and no buckets are chosen."""
        values_by_flag = {"--lengths": self.lengths, "--max-lengths": self.max_lengths, "--batches": self.batches}
        names = [name for name, value in values_by_flag.items() if value is not None]
        if names and self.buckets != ("auto",):
            raise SetupError(f"{', '.join(names)}: for --buckets auto only")


NO_BUCKETS = BucketRequest()


@dataclass(frozen=True, slots=True)
class LengthPlan:
    """The chosen lengths, and the share of padding in the computed tokens: by this plan, and by two simple plans."""

    lengths: tuple[int, ...]
    waste: float
    single_waste: float
    power_of_two_waste: float
    powers_of_two: int

    def describe(self) -> str:
        lengths, powers = ", ".join(map(str, self.lengths)), f"{self.powers_of_two} powers of two"
        others = f"one bucket: {self.single_waste:.1%}; {powers}: {self.power_of_two_waste:.1%}"
        return f"      lengths {lengths}: {self.waste:.1%} of the tokens are padding; {others}"


def choose_buckets(request: BucketRequest, max_tokens: int) -> tuple[tuple[Bucket, ...], LengthPlan | None]:
    """Chooses the buckets, and for "auto" plans their lengths. Raises SetupError if the buckets are unsuitable."""
    if request.buckets != ("auto",):
        buckets = tuple(parse_bucket(text) for text in request.buckets)
        for bucket in buckets:
            if bucket.tokens > max_tokens:
                raise SetupError(f"--bucket {bucket}: {bucket.tokens} tokens, the model takes {max_tokens}")
        longest = max(buckets, key=lambda bucket: bucket.tokens)
        if longest.tokens < MIN_TOKENS:
            raise SetupError(
                f"--bucket {longest}: the longest takes {longest.tokens} tokens, the least is {MIN_TOKENS}"
            )
        return buckets, None
    if request.lengths is None:
        raise SetupError("--buckets auto needs the lengths of real inputs: --lengths FILE")
    batches = _BATCHES if request.batches is None else request.batches
    if not batches or min(batches) < 1:
        raise SetupError(f"--batches {', '.join(map(str, batches))}: whole numbers from 1 on")
    counts = read_lengths(request.lengths, max_tokens)
    if max(counts) < MIN_TOKENS:
        raise SetupError(
            f"--lengths {request.lengths}: the longest has {max(counts)} tokens, the least is {MIN_TOKENS}"
        )
    plan = plan_lengths(counts, _LENGTHS if request.max_lengths is None else request.max_lengths)
    return tuple(Bucket(batch=batch, tokens=tokens) for tokens in plan.lengths for batch in sorted(set(batches))), plan


def read_lengths(path: Path, max_tokens: int) -> Counter[int]:
    """Counts the sequences of each length in a file, cut to the model's limit. Raises SetupError."""
    counts: Counter[int] = Counter()
    for number, line in read_lines(path, "--lengths", max_bytes=_MAX_BYTES):
        words = line.split()
        if (
            len(words) > 2
            or not all(word.isascii() and word.isdigit() and len(word) <= _MAX_DIGITS for word in words)
            or not 1 <= int(words[0]) <= _MAX_TOKENS
        ):
            problem = f"line {number}: must be a length from 1 to {_MAX_TOKENS}, and a count where there are several"
            raise SetupError(f"--lengths {path}: {problem}")
        counts[min(int(words[0]), max_tokens)] += int(words[1]) if len(words) > 1 else 1
    if not +counts:
        raise SetupError(f"--lengths {path}: holds no length")
    return +counts


def plan_lengths(counts: Mapping[int, int], max_lengths: int) -> LengthPlan:
    """Finds at most `max_lengths` bucket lengths with the fewest padded tokens for the sequences. Raises SetupError."""
    if not 1 <= max_lengths <= MAX_LENGTHS:
        raise SetupError(f"--max-lengths {max_lengths}: must be from 1 to {MAX_LENGTHS}")
    lengths = sorted(counts)
    best = _best_lengths(lengths, [counts[length] for length in lengths], max_lengths)
    powers = {min(1 << (length - 1).bit_length(), lengths[-1]) for length in lengths}
    return LengthPlan(best, _waste(counts, best), _waste(counts, lengths[-1:]), _waste(counts, powers), len(powers))


def _best_lengths(lengths: Sequence[int], counts: Sequence[int], max_lengths: int) -> tuple[int, ...]:
    """Finds the best lengths exactly, by dynamic programming.

    Each step computes the cheapest way to serve the k shortest lengths with n buckets, the longest of which is the k-th
    length. Only lengths that occur can be the best: any other bucket could be shortened to the longest sequence in it.
    """
    before = np.concatenate([[0], np.cumsum(np.asarray(counts, np.float64))])  # sequences shorter than the k-th length
    size = len(lengths)
    cost = np.full(size + 1, np.inf)
    cost[0] = 0
    choices: list[list[int]] = []
    for _ in range(min(max_lengths, size)):
        next_cost, choice = cost.copy(), list(range(size + 1))
        for last in range(1, size + 1):
            candidates = cost[:last] + lengths[last - 1] * (before[last] - before[:last])
            first = int(candidates.argmin())
            if candidates[first] < next_cost[last]:
                next_cost[last], choice[last] = candidates[first], first
        choices.append(choice)
        cost = next_cost
    chosen = []
    last = size
    for choice in reversed(choices):
        if choice[last] != last:  # otherwise a plan with one bucket fewer is as good
            chosen.append(lengths[last - 1])
            last = choice[last]
    return tuple(reversed(chosen))


def _waste(counts: Mapping[int, int], plan: Collection[int]) -> float:
    computed = sum(count * min(bucket for bucket in plan if bucket >= length) for length, count in counts.items())
    return 1 - sum(length * count for length, count in counts.items()) / computed
