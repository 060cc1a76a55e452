"""A text that is being generated: what the planner, the steps and the observer know of it, each part an object."""

import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from neuronpipe.api.v1.stages_pb2 import GenerationFigures
from neuronpipe.api.v1.tasks_pb2 import GenerationOptions
from neuronpipe.core.generated import TokenLogprobs, TokenSink
from neuronpipe.core.tracing import Link, SpanContext
from neuronpipe.stages.neuron_executor.generation.beams import BeamSearch
from neuronpipe.stages.neuron_executor.generation.prompt_lookup import PromptLookup
from neuronpipe.stages.neuron_executor.generation.sampling import TokenChooser


@dataclass(slots=True)
class TextRow:
    """A text of a sequence, alone or in a search. `token_ids`: the prompt and all tokens so far.

    A block that several rows hold counts as several uses. A block that is not full is copied before a second row writes
    to it.
    """

    token_ids: list[int]
    blocks: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SequenceCaller:
    """The caller of a text. `future`: ends with the finish reason. `weight`: the size of its tenant's share.

    `deadline_s`: a time of time.monotonic().
    """

    future: "asyncio.Future[int]"
    sink: TokenSink | None = None
    deadline_s: float = float("inf")
    tenant: str = ""
    weight: float = 1.0


@dataclass(slots=True)
class SourceText:
    """The text that a model with an encoder reads first. `blocks` hold it once it `is_read`."""

    token_ids: Sequence[int] = ()
    blocks: list[int] = field(default_factory=list)
    is_read: bool = False

    @property
    def unread(self) -> int:
        """The number of tokens that the model must read before it computes anything else."""
        return 0 if self.is_read else len(self.token_ids)


@dataclass(slots=True)
class SharedPrefix:
    """The full blocks of a text, which other texts with the same first tokens can share.

    `scope`, which contains the source, and `digests`: see block_digests. `published`: number of blocks that other texts
    can share.
    """

    scope: str = ""
    digests: list[bytes] = field(default_factory=list)
    published: int = 0


@dataclass(slots=True)
class Drafts:
    """The drafts of a text, see prompt_lookup.py. `token_ids`: the draft of the planned step.

    `lookup`: makes the drafts; None for a text without. `drafted`: tokens of all drafts so far, of which `accepted`
    were right.
    """

    lookup: PromptLookup | None = None
    token_ids: list[int] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0

    def note(self, accepted: int) -> int:
        """Counts the tokens of the planned draft, and returns the number of wrong tokens; `accepted` were right."""
        if self.lookup and self.token_ids:
            self.lookup.note(accepted)
        drafted, self.token_ids = len(self.token_ids), []
        self.drafted += drafted
        self.accepted += accepted
        return drafted - accepted


@dataclass(slots=True)
class PromptScores:
    """The log probabilities of the prompt's tokens except the first. A step scores at most `most_scored` of them."""

    most_scored: int
    logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(slots=True)
class TextRecord:
    """The times and counts of a text, for its caller, its metrics and its span. Times are on time.monotonic_ns().

    `trace`: the context of its span, if its request is sampled. `links`: links from the span to some of its steps.
    """

    arrived_ns: int = field(default_factory=time.monotonic_ns)
    trace: SpanContext | None = None
    links: list[Link] = field(default_factory=list)
    started_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    longest_gap_ns: int = 0
    preempted_ns: list[int] = field(default_factory=list)
    steps: int = 0
    cached_tokens: int = 0

    @property
    def figures(self) -> GenerationFigures:
        return GenerationFigures(
            queue_ns=max(0, self.started_ns - self.arrived_ns),
            prefill_ns=max(0, self.first_token_ns - self.started_ns),
            decode_ns=self.last_token_ns - self.first_token_ns,
            longest_gap_ns=self.longest_gap_ns,
            steps=self.steps,
            cached_tokens=self.cached_tokens,
        )

    def note_token(self, now_ns: int) -> None:
        if self.first_token_ns:
            self.longest_gap_ns = max(self.longest_gap_ns, now_ns - self.last_token_ns)
        else:
            self.first_token_ns = now_ns
        self.last_token_ns = now_ns


class Rank(NamedTuple):
    """The place of a sequence among others: sequences of lower rank go first.

    Interactive sequences go before bulk sequences, then tenants within their shares before other tenants, and then
    older sequences before newer sequences.
    """

    is_bulk: bool
    is_beyond_share: bool
    number: int

    @property
    def priority(self) -> tuple[bool, bool]:
        """The rank without the number."""
        return self.is_bulk, self.is_beyond_share

    @property
    def last_of_priority(self) -> "Rank":
        """A rank behind all sequences of the same priority."""
        return Rank(self.is_bulk, self.is_beyond_share, sys.maxsize)


@dataclass(eq=False, slots=True)
class GeneratedSequence:
    """A text that is being generated, or several texts of one length among which a search finds the best.

    - `rows`: the texts. `computed`: number of their tokens whose keys and values are in their blocks.
    - `most_rows`: number of texts that may be searched side by side.
    - `prompt_scores`: None unless the request asks for them.
    - `logprobs`: log probabilities of the newest tokens.
    - `waits_since_s`: a time of time.monotonic(). `kept_tokens`: until the text has this number of new tokens, no
      text of another tenant may preempt it.
    """

    rank: Rank
    rows: list[TextRow]
    options: GenerationOptions
    chooser: TokenChooser | BeamSearch
    end_token_ids: frozenset[int]
    caller: SequenceCaller
    source: SourceText = field(default_factory=SourceText)
    prefix: SharedPrefix = field(default_factory=SharedPrefix)
    drafts: Drafts = field(default_factory=Drafts)
    prompt_scores: PromptScores | None = None
    record: TextRecord = field(default_factory=TextRecord)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_tokens: int = field(init=False)
    most_rows: int = field(init=False)
    computed: int = 0
    waits_since_s: float = field(default_factory=time.monotonic)
    kept_tokens: int = 0

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.token_ids)
        self.most_rows = max(1, self.options.num_beams)

    @property
    def token_ids(self) -> list[int]:
        """The tokens of the first text."""
        return self.rows[0].token_ids

    @property
    def tenant(self) -> str:
        return self.caller.tenant

    @property
    def weight(self) -> float:
        return self.caller.weight

    @property
    def blocks_held(self) -> int:
        """The number of different blocks that the sequence holds."""
        if len(self.rows) == 1:
            return len(self.source.blocks) + len(self.rows[0].blocks)
        return len(self.source.blocks) + len({block for row in self.rows for block in row.blocks})

    @property
    def most_tokens(self) -> int:
        """The tokens of the prompt, and of the longest text that may follow."""
        return self.prompt_tokens + self.options.max_new_tokens

    @property
    def input_tokens(self) -> int:
        """The number of tokens that the caller sent."""
        return len(self.source.token_ids) or self.prompt_tokens

    @property
    def generated(self) -> int:
        """The number of tokens that were generated."""
        return len(self.token_ids) - self.prompt_tokens

    @property
    def is_kept(self) -> bool:
        """Whether texts of other tenants may not preempt the sequence now."""
        return self.generated < self.kept_tokens

    @property
    def left(self) -> int:
        """The tokens to compute before the next token can be chosen; at most `most_scored` of a scored prompt."""
        uncomputed_tokens = len(self.token_ids) - self.computed
        return min(uncomputed_tokens, self.prompt_scores.most_scored) if self.prompt_scores else uncomputed_tokens

    def left_with(self, spare_scores: int) -> int:
        """Returns `left`, limited to a step that has room for `spare_scores` further scores."""
        return min(self.left, 1 + spare_scores) if self.prompt_scores else self.left
