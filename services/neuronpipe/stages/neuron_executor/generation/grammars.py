"""Structured output: makes the grammars of requests, and finds the tokens that may follow a text by its grammar.

Only this file imports llguidance, and only when a request first needs it. grammar_jobs.py says when a grammar is
compiled, grammar_checks.py which grammars are refused before, and schema_repairs.py what their schemas become.
"""

import copy
import json
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from neuronpipe.api.v1.tasks_pb2 import GenerationOptions
from neuronpipe.core.errors import InternalError, InvalidInput, NeuronpipeError
from neuronpipe.core.logs import log_fault
from neuronpipe.core.model import ModelSpec
from neuronpipe.stages.neuron_executor.generation.grammar_checks import check_grammar, schemas_in
from neuronpipe.stages.neuron_executor.generation.grammar_jobs import MOST_EXPRESSIONS, GrammarJobs
from neuronpipe.stages.neuron_executor.generation.schema_repairs import repaired
from neuronpipe.tasks.text_options import GenerationFacts, form_of

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Limits of a step, below llguidance's own limits. With 30,000 tokens no step of the worst known grammars took more than
# 3 ms. Usual schemas take 0.01 ms, p90 0.1 (CPU time, measured 2026-11-26).
_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": MOST_EXPRESSIONS,
    "step_lexer_fuel": 50_000,
    "step_max_items": 20_000,
    "max_lexer_states": 20_000,
    "verbose_errors": False,
}
_MAX_REASON = 200
# The options of JSON in llguidance. A schema could otherwise set others, and would then allow texts that are not JSON.
_OF_JSON: Any = {
    # White space between the parts of JSON. Without a limit, models sometimes write it endlessly.
    "whitespace_pattern": r"\n[ \t]{0,40}|[ \t]{1,2}",
    "item_separator": ",",
    "key_separator": ":",
    "lenient": False,
    "coerce_one_of": False,
}


class TextGrammar:
    """The grammar of one text, at the place that the text has reached."""

    def __init__(
        self,
        matcher: "LLMatcher",
        option: str,
        vocabulary_size: int,
        end_token_ids: Collection[int],
        special_ids: Collection[int],
    ) -> None:
        """`option`: the field of the options that contains the grammar. `special_ids`: tokens without a text."""
        self._matcher = matcher
        self._option = option
        self._vocabulary_size = vocabulary_size
        self._ends = [token_id for token_id in end_token_ids if token_id in special_ids]
        self._spelled_ends = [token_id for token_id in end_token_ids if token_id not in special_ids]
        self._followed = 0

    def copy(self) -> "TextGrammar":
        """Copies the grammar for another text with the same tokens so far."""
        other = copy.copy(self)
        other._matcher = self._matcher.deep_copy()
        return other

    def allowed(self, token_ids: Sequence[int]) -> NDArray[np.bool_]:
        """Returns whether each token of the vocabulary may come after `token_ids`, the text so far.

        The text must begin with the tokens of the last call. Tokens that end texts may follow where the grammar may
        end. Raises InvalidInput if no token may follow, or if finding the tokens would cost too much.
        """
        for token_id in token_ids[self._followed :]:
            if not self._matcher.consume_token(token_id):
                raise _refusal(self._option, self._matcher)
        self._followed = len(token_ids)
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise _refusal(self._option, self._matcher)
        known = np.unpackbits(bits, count=min(8 * len(bits), self._vocabulary_size), bitorder="little")
        allowed = np.zeros(self._vocabulary_size, np.bool_)  # a model may have scores for more tokens than exist
        allowed[: len(known)] = known
        allowed[self._ends] = self._matcher.is_accepting()
        for token_id in self._spelled_ends:
            allowed[token_id] = allowed[token_id] and self._accepts_after(token_id)
        if not allowed.any():
            raise InvalidInput(f"options.{self._option}", f"no token may follow {len(token_ids)} tokens of the text")
        return allowed

    def _accepts_after(self, token_id: int) -> bool:
        taken = self._matcher.try_consume_tokens([token_id])
        is_accepting = self._matcher.is_accepting()
        self._matcher.rollback(taken)
        return is_accepting


class Grammars:
    """The grammars of one model. Its owner calls it on the event loop, and closes it."""

    def __init__(self, spec: ModelSpec, tokenizer_json: Callable[[], bytes]) -> None:
        self._spec = spec
        self._tokenizer_json = tokenizer_json
        self._reading = threading.Lock()
        self._jobs: GrammarJobs[LLMatcher] = GrammarJobs(spec.name, self._compiled)

    def close(self) -> None:
        self._jobs.close()

    async def grammar_for(
        self, options: GenerationOptions, tenant: str = "", wait: Callable[[bool], None] = lambda is_waiting: None
    ) -> TextGrammar | None:
        """Returns the grammar of a new text, or None if the options contain none.

        `wait`: called with True if the grammar takes longer, and with False once it exists. Raises InvalidInput for a
        grammar that is wrong or costs too much, and Overloaded if other grammars are being compiled.
        """
        if not (option := form_of(options)):
            return None
        value = getattr(options, option)
        text = json.dumps([*value]) if option == "choices" else str(value)
        matcher = await self._jobs.compiled(tenant, option, text, wait)
        _, special_ids = self._tokenizer
        ends = {*GenerationFacts.of(self._spec).end_token_ids, *options.stop_token_ids}
        return TextGrammar(matcher.deep_copy(), option, self._spec.vocabulary_size, ends, special_ids)

    def _compiled(self, option: str, text: str) -> "LLMatcher | NeuronpipeError":
        """Compiles the grammar of a text without tokens, or returns the error of the grammar. Runs in a thread."""
        from llguidance import LLMatcher, LLParserLimits

        try:
            with self._reading:
                tokenizer, _ = self._tokenizer
            check_grammar(option, text)
            matcher = LLMatcher(tokenizer, _written(option, text), log_level=0, limits=LLParserLimits(**_LIMITS))
            matchers = _begun(matcher)
            return next((_refusal(option, begun) for begun in matchers if begun.is_error()), matcher)
        except (ValueError, RecursionError) as error:
            return _invalid(option, str(error))
        except BaseException as fault:  # a panic of the library is no Exception
            log_fault("a grammar could not be compiled", fault, model=self._spec.name)
            return InternalError("the grammar could not be compiled")

    @cached_property
    def _tokenizer(self) -> "tuple[LLTokenizer, frozenset[int]]":
        """The library's form of the tokenizer, and its tokens without a text. Large tokenizers take a second.

        Raises ValueError if the tokenizer is not supported.
        """
        from llguidance import LLTokenizer

        written = self._tokenizer_json()
        content = json.loads(written)
        special_ids = frozenset(token["id"] for token in content["added_tokens"] if token["special"])
        model, decoder = content["model"]["type"], (content["decoder"] or {}).get("type")
        kind = f"the model's tokenizer ({model}, decoder {decoder})"
        ends = [token_id for token_id in GenerationFacts.of(self._spec).end_token_ids if token_id in special_ids]
        if not ends:
            raise ValueError(f"{kind} has no special token that ends a text")
        try:
            # Unigram's special tokens have other names in this file: see compiler/tokenizers.py.
            return LLTokenizer("" if model == "Unigram" else written.decode(), eos_token=ends), special_ids
        except ValueError as error:
            raise ValueError(f"{kind} is not supported") from error


def _begun(matcher: "LLMatcher") -> Iterator["LLMatcher"]:
    """Computes the first tokens of a text, then the tokens behind one of them. Yields the matcher of each.

    The first bit mask takes longest of all. Both show whether any text has this grammar, and whether it is too large.
    """
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    yield matcher
    second = matcher.deep_copy()
    if second.consume_token(int(bits.argmax())) and not second.is_stopped():
        second.compute_bitmask()
    yield second


def _written(option: str, text: str) -> str:
    """Writes the grammar in llguidance's form. Raises ValueError."""
    from llguidance import LLMatcher, grammar_from

    if option in ("json_schema", "json_object"):
        schema = json.dumps(repaired(json.loads(text))) if option == "json_schema" else '{"type": "object"}'
        return LLMatcher.grammar_from_json_schema(schema, overrides=_OF_JSON)
    if option == "choices":
        return grammar_from("choice", text)
    if option == "regex":
        return LLMatcher.grammar_from_regex(text)
    written, at = "", 0
    for begin, end, schema in schemas_in(text, json.JSONDecoder()):
        new_schema = repaired(schema)
        written += text[at:begin] + json.dumps(new_schema | {"x-guidance": _OF_JSON} if new_schema else new_schema)
        at = end
    return LLMatcher.grammar_from_lark(written + text[at:])


def _refusal(option: str, matcher: "LLMatcher") -> InvalidInput:
    reason = matcher.get_error().removesuffix("<non-verbose/>")
    if "too many expressions" in reason or "grammar) too big" in reason:
        reason = f"with its repetitions written out, it has more than {MOST_EXPRESSIONS:,} expressions"
    return _invalid(option, "no text has it" if reason.startswith("NoExtension") else reason)


def _invalid(option: str, reason: str) -> InvalidInput:
    return InvalidInput(f"options.{option}", f"cannot be followed: {' '.join(reason.split())[:_MAX_REASON]}")
