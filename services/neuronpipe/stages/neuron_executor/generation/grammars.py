"""Structured output: compiles the grammars that requests ask for, and says which tokens may follow a text by its own.

The only file that imports llguidance, and only when a request first needs it. Grammars are compiled in a thread, so
that neither the event loop nor the steps wait for them.
"""

import asyncio
import copy
import json
import re
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from decimal import Decimal
from functools import cached_property, partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from neuronpipe.api.v1.tasks_pb2 import GenerationOptions
from neuronpipe.core.errors import InternalError, InvalidInput, NeuronpipeError, Overloaded
from neuronpipe.core.logs import log_fault
from neuronpipe.core.model import ModelSpec
from neuronpipe.stages.neuron_executor.runtimes.host import ComputeThread
from neuronpipe.tasks.text_generation import GenerationFacts, form_of

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_COMPILE_LIMIT_S = 5.0
_LOOKS_S = 0.1
# Of the grammars that are kept compiled, the least recently used go first. One of 42,000 characters takes 15 MB.
_MAX_KEPT, _MAX_KEPT_CHARACTERS, _KEPT_S = 64, 1 << 18, 600
# llguidance finds multiples of a number with an automaton of as many states, which its own limits do not count: a
# million of them takes 14 s and 400 MB.
_MAX_MULTIPLES = 10_000
# Below llguidance's own limits of a step. With 30,000 tokens no step of the worst grammars that we know
# took more than 3 ms; with usual schemas one takes 0.01 ms, p90 0.1 (CPU time, measured 2026-11-26).
_LIMITS: dict[str, Any] = {
    "step_lexer_fuel": 50_000,
    "step_max_items": 20_000,
    "max_lexer_states": 20_000,
    "verbose_errors": False,
}
_MAX_REASON = 200
# llguidance computes with floats of 64 bits, in which larger integers have others' values, and with no bound beyond.
_MAX_EXACT, _MAX_INT64 = 1 << 53, (1 << 63) - 1
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
# What else texts of these formats must have, or Python takes some for no date or time: there are leap years, and no
# year 0 and no second 60.
_DATE = (
    "^([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)-",
    "^([0-9]{4}-(0[13-9]|1[0-2]|02-([01]|2[0-8]))"
    "|([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)-02-29)",
)
_FORMATS = {
    "date": _DATE,
    "time": ("^[0-9]{2}:[0-9]{2}:[0-5]",),
    "date-time": (*_DATE, "[Tt][0-9]{2}:[0-9]{2}:[0-5]"),
}
_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
# All names are strings; so says zod of its records.
_ANY_NAMES = "propertyNames", {"type": "string"}
# Between the parts of JSON. Models that may write white space without an end sometimes do.
_WHITE_SPACE = r"\n[ \t]{0,40}|[ \t]{1,2}"


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
        """`option`: the field that asks for it. `special_ids`: tokens without a text."""
        self._matcher = matcher
        self._option = option
        self._vocabulary_size = vocabulary_size
        self._ends = [one for one in end_token_ids if one in special_ids]
        self._spelled_ends = [one for one in end_token_ids if one not in special_ids]
        self._followed = 0

    def copy(self) -> "TextGrammar":
        """The grammar of another text with the same tokens so far."""
        other = copy.copy(self)
        other._matcher = self._matcher.deep_copy()
        return other

    def allowed(self, token_ids: Sequence[int]) -> NDArray[np.bool_]:
        """Whether each token of the vocabulary may follow `token_ids`, which begin with those of the last call.

        Tokens that end texts may follow where the grammar may end. Raises InvalidInput where no token may follow, or
        where to find that out would cost too much.
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
        self._thread = ComputeThread(f"grammars-{spec.name}")
        # By option and value, the least recently used first; when each was used.
        self._kept: OrderedDict[tuple[str, str], tuple[float, Future[LLMatcher | NeuronpipeError]]] = OrderedDict()
        # How long the thread has computed on its last grammar.
        self._spent_s: Callable[[], float] = float

    def close(self) -> None:
        """Compiles no more."""
        self._thread.close()

    async def of(self, options: GenerationOptions) -> TextGrammar | None:
        """The grammar of a new text; None where the options ask for none.

        Raises InvalidInput for one that is wrong or costs too much, and Overloaded where others are compiled.
        """
        if not (option := form_of(options)):
            return None
        value = getattr(options, option)
        job = self._job(option, json.dumps([*value]) if option == "choices" else str(value))
        compiling = asyncio.wrap_future(job)
        left_s = _COMPILE_LIMIT_S
        while not compiling.done():
            await asyncio.wait([compiling], timeout=max(left_s, _LOOKS_S))  # cancels nothing
            if compiling.cancelled() or job.cancel():
                raise Overloaded("the grammars of other requests are being compiled", _COMPILE_LIMIT_S)
            left_s = _COMPILE_LIMIT_S - self._spent_s()
            if not compiling.done() and left_s <= 0:
                raise InvalidInput(f"options.{option}", f"takes more than {_COMPILE_LIMIT_S:g} s to compile, the limit")
        compiled = compiling.result()
        if isinstance(compiled, NeuronpipeError):
            raise compiled.with_traceback(None)  # or each of its callers would make it longer
        _, special_ids = self._tokenizer
        ends = {*GenerationFacts.of(self._spec).end_token_ids, *options.stop_token_ids}
        return TextGrammar(compiled.deep_copy(), option, self._spec.vocabulary_size, ends, special_ids)

    def _job(self, option: str, text: str) -> "Future[LLMatcher | NeuronpipeError]":
        now_s, key = time.monotonic(), (option, text)
        _, job = self._kept.pop(key, (now_s, None))
        if job is None or job.cancelled():
            job = self._thread.submit(partial(self._compiled, option, text))
        self._kept[key] = now_s, job
        while self._is_beyond_limits(now_s):
            _, (_, oldest) = self._kept.popitem(last=False)
            oldest.cancel()  # if it waits
        return job

    def _is_beyond_limits(self, now_s: float) -> bool:
        used_s, _ = next(iter(self._kept.values()))
        characters = sum(len(text) for _, text in self._kept)
        return len(self._kept) > _MAX_KEPT or characters > _MAX_KEPT_CHARACTERS or now_s - used_s > _KEPT_S

    def _compiled(self, option: str, text: str) -> "LLMatcher | NeuronpipeError":
        """The grammar before the first token, or why there is none. In the thread."""
        from llguidance import LLMatcher, LLParserLimits

        self._spent_s = _stopwatch()
        try:
            tokenizer, _ = self._tokenizer
            _check(option, text)
            matcher = LLMatcher(tokenizer, _written(option, text), log_level=0, limits=LLParserLimits(**_LIMITS))
            matcher.compute_bitmask()  # the first takes longest, and tells whether any text has this grammar
            return _refusal(option, matcher) if matcher.is_error() else matcher
        except (ValueError, RecursionError) as error:
            return _invalid(option, str(error))
        except BaseException as fault:  # a panic of the library is no Exception
            log_fault("a grammar could not be compiled", fault, model=self._spec.name)
            return InternalError("the grammar could not be compiled")

    @cached_property
    def _tokenizer(self) -> "tuple[LLTokenizer, frozenset[int]]":
        """The library's form of the tokenizer, and its tokens without a text. It takes a second for large ones.

        Raises ValueError for a tokenizer that is not supported.
        """
        from llguidance import LLTokenizer

        written = self._tokenizer_json()
        content = json.loads(written)
        special_ids = frozenset(one["id"] for one in content["added_tokens"] if one["special"])
        model, decoder = content["model"]["type"], (content["decoder"] or {}).get("type")
        kind = f"the model's tokenizer ({model}, decoder {decoder})"
        ends = [one for one in GenerationFacts.of(self._spec).end_token_ids if one in special_ids]
        if not ends:
            raise ValueError(f"{kind} has no special token that ends a text")
        try:
            # Unigram's special tokens have other names in this file: see compiler/tokenizers.py.
            return LLTokenizer("" if model == "Unigram" else written.decode(), eos_token=ends), special_ids
        except ValueError as error:
            raise ValueError(f"{kind} is not supported") from error


def _stopwatch() -> Callable[[], float]:
    """Seconds that the calling thread has computed since then, or that have passed where the system cannot tell."""
    on_linux = sys.platform == "linux"
    clock = time.pthread_getcpuclockid(threading.get_ident()) if on_linux else time.CLOCK_MONOTONIC
    began_s = time.clock_gettime(clock)
    return lambda: time.clock_gettime(clock) - began_s


def _written(option: str, text: str) -> str:
    """A grammar as llguidance takes it. Raises ValueError."""
    from llguidance import LLMatcher, grammar_from

    if option in ("json_schema", "json_object"):
        schema = json.dumps(_followed(json.loads(text))) if option == "json_schema" else '{"type": "object"}'
        # A schema could change these itself, and then it would allow other texts than JSON.
        return LLMatcher.grammar_from_json_schema(
            schema,
            overrides={
                "whitespace_pattern": _WHITE_SPACE,
                "item_separator": ",",
                "key_separator": ":",
                "lenient": False,
                "coerce_one_of": False,
            },
        )
    if option == "choices":
        return grammar_from("choice", text)
    return LLMatcher.grammar_from_regex(text) if option == "regex" else LLMatcher.grammar_from_lark(text)


def _followed(schema: Any) -> Any:
    """A schema with all that its formats say, and without a keyword that says nothing."""
    if isinstance(schema, list):
        return [_followed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made: dict[str, Any] = {}
    for name, one in schema.items():
        if name in _SCHEMAS_BY_NAME and isinstance(one, dict):
            made[name] = {key: _followed(inner) for key, inner in one.items()}
        elif (name, one) != _ANY_NAMES:
            made[name] = one if name in ("const", "enum") else _followed(one)
    if isinstance(name := schema.get("format"), str) and name in _FORMATS:
        given = [{"allOf": made["allOf"]}] if "allOf" in made else []
        made["allOf"] = [*given, *({"pattern": one} for one in _FORMATS[name])]
    return made


def _check(option: str, text: str) -> None:
    """Raises ValueError for what llguidance would follow wrongly, or at a cost that it does not count, and for schemas
    that are no JSON.
    """
    if option == "regex" and (len(text) - len(text.rstrip("\\"))) % 2:
        raise ValueError("it ends within an escape")
    decoder = json.JSONDecoder(parse_float=Decimal)
    schemas: list[Any] = [decoder.decode(text)] if option == "json_schema" else []
    if option == "grammar":
        schemas += [decoder.raw_decode(text, place.end())[0] for place in re.finditer(r"%json\s*", text)]
    states = Decimal(0)
    for schema in chain.from_iterable(map(_parts, schemas)):
        if not isinstance(schema, dict):
            continue
        if isinstance(multiple := schema.get("multipleOf"), int | Decimal):
            states += _states(Decimal(multiple))
        for keyword in ("const", "enum", *_BOUNDS):
            for one in _parts(schema.get(keyword)):
                if isinstance(one, int | Decimal) and not _is_exact(Decimal(one).copy_abs(), keyword in _BOUNDS):
                    raise ValueError(f"{keyword} has a number beyond {_MAX_EXACT} that a float of 64 bits has not")
        least, required = schema.get("minProperties"), schema.get("required")
        named = len({*map(str, required)}) if isinstance(required, list) else 0
        if isinstance(least, int) and least > named + 1:
            raise ValueError(f"minProperties of {least} and {named} required ones, others may have the same name")
    if states > _MAX_MULTIPLES:
        raise ValueError(
            f"the values of multipleOf add up to more than {_MAX_MULTIPLES}, in units of their last digits"
        )


def _parts(value: Any) -> Iterator[Any]:
    """A value of JSON, and all that it holds."""
    yield value
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _parts(one)


def _states(multiple: Decimal) -> Decimal:
    if abs(multiple.adjusted()) > 20:  # beyond what can be computed with
        return Decimal("inf")
    exponent = multiple.normalize().as_tuple().exponent
    return abs(multiple.scaleb(-exponent) if isinstance(exponent, int) and exponent < 0 else multiple)


def _is_exact(number: Decimal, is_bound: bool) -> bool:
    if number >= _MAX_INT64:
        return is_bound or number == _MAX_INT64
    return number <= _MAX_EXACT or Decimal(float(number)) == number


def _refusal(option: str, matcher: "LLMatcher") -> InvalidInput:
    reason = matcher.get_error().removesuffix("<non-verbose/>")
    return _invalid(option, "no text has it" if reason.startswith("NoExtension") else reason)


def _invalid(option: str, reason: str) -> InvalidInput:
    return InvalidInput(f"options.{option}", f"cannot be followed: {' '.join(reason.split())[:_MAX_REASON]}")
