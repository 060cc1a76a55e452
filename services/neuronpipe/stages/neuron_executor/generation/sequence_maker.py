"""Makes sequences of the items of one generating model, after checks of their options."""

import asyncio
import itertools
from functools import lru_cache, partial
from hashlib import blake2b

from neuronpipe.api.v1.tasks_pb2 import GenerationOptions
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.generated import NewTokens, TokenSink
from neuronpipe.core.items import ExecuteItem
from neuronpipe.core.model import ModelSpec
from neuronpipe.stages.neuron_executor.generation.beams import BeamSearch
from neuronpipe.stages.neuron_executor.generation.grammars import Grammars, TextGrammar
from neuronpipe.stages.neuron_executor.generation.held_blocks import HeldBlocks
from neuronpipe.stages.neuron_executor.generation.logit_rules import LogitRules
from neuronpipe.stages.neuron_executor.generation.prompt_lookup import PromptLookup
from neuronpipe.stages.neuron_executor.generation.sampling import TokenChooser
from neuronpipe.stages.neuron_executor.generation.sequence import (
    Drafts,
    GeneratedSequence,
    PromptScores,
    Rank,
    SequenceCaller,
    SharedPrefix,
    SourceText,
    TextRecord,
    TextRow,
)
from neuronpipe.tasks.inputs.kind import input_kind
from neuronpipe.tasks.text_options import GenerationFacts, check_options

_DIGEST_BYTES = 16
# Number of different options whose check is remembered, because the texts of a request come one by one with the same
# options. A check takes 50 µs (2026-11-30).
_CHECKED_OPTIONS = 64


class SequenceMaker:
    """Makes the sequences of one model."""

    def __init__(
        self, spec: ModelSpec, grammars: Grammars, blocks: HeldBlocks, *, most_scored: int, draft_tokens: int
    ) -> None:
        """`most_scored`: the tokens of a prompt that a step scores. `draft_tokens`: the tokens of a draft, 0: none."""
        self._spec = spec
        self._grammars = grammars
        self._blocks = blocks
        self._most_scored = most_scored
        self._draft_tokens = draft_tokens
        self._kind = input_kind(spec)
        self._check_options = lru_cache(_CHECKED_OPTIONS)(
            lambda written: check_options(GenerationOptions.FromString(written), spec)
        )
        self._facts = GenerationFacts.of(spec)
        self._numbers = itertools.count()

    async def make(self, item: ExecuteItem, sink: TokenSink | None, record: TextRecord) -> GeneratedSequence:
        """Returns the sequence of an item. Its sink is told while the item waits for its grammar.

        Raises InvalidInput, also for a text that the model or the empty cache could not hold, and Overloaded.
        """
        options = item.options
        if options is None or len(item.sequences) != 1:
            raise InvalidInput("input", f"model {self._spec.name!r} generates; it takes one prompt with its options")
        self._kind.check(item.sequences.arrays[0])
        self._check_options(options.SerializeToString())
        grammar = await self._grammars.grammar_for(options, item.call.caller.tenant, partial(_tell_wait, sink))
        sequence = self._sequence_of(item, options, grammar, sink, record)
        self._refuse_too_long(sequence)
        return sequence

    def _sequence_of(
        self,
        item: ExecuteItem,
        options: GenerationOptions,
        grammar: TextGrammar | None,
        sink: TokenSink | None,
        record: TextRecord,
    ) -> GeneratedSequence:
        (arrays,) = item.sequences.arrays
        input_ids, start_ids, call = arrays["input_ids"].tolist(), self._facts.decoder_start_token_ids, item.call
        # With an encoder, the input is the source, and the text has its own start.
        token_ids, source_ids = ([*start_ids], input_ids) if start_ids else (input_ids, [])
        # Texts of different sources have different keys and values for the same tokens.
        source = blake2b(repr(source_ids).encode(), digest_size=_DIGEST_BYTES).hexdigest() if source_ids else ""
        ends = frozenset((*self._facts.end_token_ids, *options.stop_token_ids))
        rules = LogitRules(options, len(token_ids), ends, self._facts, input_ids)
        searches = options.num_beams > 1
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        deadline_s = float("inf") if call.deadline_s is None else call.deadline_s
        has_drafts = self._draft_tokens and not searches
        return GeneratedSequence(
            rank=Rank(call.is_bulk, item.work.is_beyond_share, next(self._numbers)),
            rows=[TextRow(token_ids)],
            options=options,
            chooser=BeamSearch(rules, grammar) if searches else TokenChooser(rules, item.sequence, grammar),
            end_token_ids=ends,
            caller=SequenceCaller(future, sink, deadline_s, call.caller.tenant, item.work.weight),
            source=SourceText(source_ids),
            prefix=SharedPrefix(call.caller.cache_scope + source),
            drafts=Drafts(PromptLookup(source_ids, self._draft_tokens) if has_drafts else None),
            prompt_scores=PromptScores(self._most_scored) if options.prompt_logprobs else None,
            record=record,
        )

    def _refuse_too_long(self, sequence: GeneratedSequence) -> None:
        """Raises InvalidInput for a text that the model or the empty cache could not hold."""
        spec, blocks, is_source = self._spec, self._blocks, bool(self._facts.decoder_start_token_ids)
        is_too_long = not is_source and sequence.most_tokens > spec.max_tokens
        if is_too_long or not blocks.could_hold(sequence):
            limit = min(blocks.most_tokens, spec.max_tokens) if is_too_long else blocks.most_tokens
            tokens, name = sequence.input_tokens, "text" if is_source else "prompt"
            holds = f"the executor's cache for this model holds {limit}"
            if tokens >= limit:
                raise InvalidInput(name, f"{tokens} tokens, {holds}; send less")
            new_tokens = sequence.options.max_new_tokens
            problem = f"{tokens} tokens of the {name} and {new_tokens} new ones, {holds}"
            raise InvalidInput("options.max_new_tokens", problem)


def _tell_wait(sink: TokenSink | None, is_waiting: bool) -> None:
    if sink:
        sink.put(NewTokens(is_waiting=is_waiting))
