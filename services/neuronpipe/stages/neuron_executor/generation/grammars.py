"""Structured output: compiles the grammars of requests, and finds the tokens that may follow a text by its grammar.

Only this file imports llguidance, and only when a request first needs it. Threads compile grammars, so that neither the
event loop nor the steps wait for them. Each tenant has its own threads and kept grammars. The library's work cannot be
stopped, so a compilation that takes too long is abandoned, and its tenant waits until it has ended.
"""

import asyncio
import copy
import json
import re
import sys
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
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
from neuronpipe.stages.neuron_executor.generation.schema_work import BY_NAME, MOST_NEXT, MOST_WORK, SchemaWork
from neuronpipe.stages.neuron_executor.runtimes.host import ComputeThread, give_way
from neuronpipe.tasks.text_generation import GenerationFacts, form_of

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_COMPILE_LIMIT_S = 5.0
_LOOKS_S = 0.1
# A request that waits longer than this lets others run in its place, and a compilation that takes longer gives way.
_SOON_S = 0.02
# Grammars that are compiled at the same time, each of another tenant.
_PLACES = 4
# Limits of compiled grammars that are kept. The least recently used grammar of the tenant with most of them goes first.
# A grammar of 42,000 characters takes 15 MB. Repetitions count as if they were written out: a{9000} takes 3 MB.
_MAX_KEPT, _MAX_KEPT_CHARACTERS, _KEPT_S = 64, 1 << 18, 600
# Freeing a grammar of 20,000 characters takes 2 ms, in which nothing else runs. Grammars are freed one after another,
# with pauses, but soon enough that few wait, however fast other grammars replace them.
_FREES_EVERY_S, _FREES_WITHIN_S = 0.02, 0.1
# llguidance finds multiples of a number by an automaton with as many states, which its own limits do not count: a
# million states take 14 s and 400 MB.
_MAX_MULTIPLES = 10_000
# Limits of a step, below llguidance's own limits. With 30,000 tokens no step of the worst known grammars took more than
# 3 ms. Usual schemas take 0.01 ms, p90 0.1 (CPU time, measured 2026-11-26).
_LIMITS: dict[str, Any] = {
    # Expressions of a grammar. The library's own limit of a million lets a{150000} take 60 MB and 25 ms a step. A list
    # of 4,000 words of 20 letters is below this limit.
    "initial_lexer_fuel": 50_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 20_000,
    "max_lexer_states": 20_000,
    "verbose_errors": False,
}
_MAX_REASON = 200
# llguidance computes with 64-bit floats, which do not represent larger integers exactly, and ignores bounds beyond.
_MAX_EXACT, _MAX_INT64 = 1 << 53, (1 << 63) - 1
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_WITH_NUMBERS = ("const", "enum", *_BOUNDS)
# Further patterns for texts of these formats. Without them, Python refuses some texts as dates or times: leap years
# exist, the year 0 and the second 60 do not.
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
# Formats of pydantic that llguidance does not know, each with a format that its texts also have; empty: any text.
_ALSO = {
    **dict.fromkeys(("path", "file-path", "directory-path", "password", "binary", "base64", "base64url"), ""),
    **dict.fromkeys(("ipv4network", "ipv4interface", "ipvanyaddress", "ipvanynetwork", "ipvanyinterface"), "ipv4"),
    **dict.fromkeys(("ipv6network", "ipv6interface"), "ipv6"),
    **dict.fromkeys((f"uuid{version}" for version in range(1, 9)), "uuid"),
}
_FORMATS |= {f"uuid{version}": (f"^.{{14}}{version}",) for version in range(1, 9)}
_FORMATS |= {
    name: (f"^([{signs}]{{4}})*([{signs}]{{2}}==|[{signs}]{{3}}=)?$",)
    for name, signs in (("base64", "A-Za-z0-9+/"), ("base64url", "A-Za-z0-9_-"))
}
# The start of pydantic's pattern of a Decimal, which has a look-ahead. llguidance supports none.
_DECIMAL = r"^(?!^[-+.]*$)[+-]?0*"
_MAX_DIGITS = 64
# Python refuses to read longer whole numbers.
_MAX_NUMBER_DIGITS = 4300
# llguidance computes intersections of terms of a grammar in a time that each term doubles.
_MAX_INTERSECTIONS = 8
_QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)*"|/(?:[^/\\\n]|\\.)+/|(?://|#).*')
# The parts of a regex that decide how long it is with its repetitions written out.
_REPEATED = re.compile(r"\\.|\[(?:\\.|[^\]\\])+\]|[()]|\{(\d{1,9})(?:,(\d{0,9}))?\}")
_PATTERNS_OF = {name: 1 + len(patterns) for name, patterns in _FORMATS.items()}
# All names are strings, so this says nothing; zod writes it for records.
_ANY_NAMES = "propertyNames", {"type": "string"}
# White space between the parts of JSON. Without a limit, models sometimes write it endlessly.
_WHITE_SPACE = r"\n[ \t]{0,40}|[ \t]{1,2}"

# The options of JSON in llguidance. A schema could otherwise set others, and would then allow texts that are not JSON.
_OF_JSON: Any = {
    "whitespace_pattern": _WHITE_SPACE,
    "item_separator": ",",
    "key_separator": ":",
    "lenient": False,
    "coerce_one_of": False,
}
_JSON_IN_LARK = re.compile(r"%json\s*")


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

        The text begins with the tokens of the last call.

        Tokens that end texts may follow where the grammar may end. Raises InvalidInput if no token may follow, or if
        finding the tokens would cost too much.
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


@dataclass(eq=False, slots=True)
class _GrammarJob:
    """A grammar to compile or to keep.

    `size`: its characters, with repetitions written out once they are known. `spent_s`: compute time of the thread that
    compiles it, `thread_id`.
    """

    option: str
    text: str
    compiled: "asyncio.Future[LLMatcher | NeuronpipeError]"
    size: int
    used_s: float = 0.0
    has_begun: bool = False
    thread_id: int = 0
    spent_s: Callable[[], float] = float

    def leave(self) -> None:
        """Cancels the compilation if it has not begun, because no request waits for it."""
        if not self.has_begun:
            self.compiled.cancel()


class Grammars:
    """The grammars of one model. Its owner calls it on the event loop, and closes it."""

    def __init__(self, spec: ModelSpec, tokenizer_json: Callable[[], bytes]) -> None:
        self._spec = spec
        self._tokenizer_json = tokenizer_json
        self._reading = threading.Lock()
        # By tenant, option and value, the least recently used first.
        self._kept: OrderedDict[tuple[str, str, str], _GrammarJob] = OrderedDict()
        # When the last superfluous grammar is freed, by the event loop's clock.
        self._frees_last_s = 0.0
        self._sweep: asyncio.TimerHandle | None = None
        # By tenant. The first tenant has the next turn.
        self._waiting: dict[str, deque[_GrammarJob]] = {}
        # The tenants for which a thread computes.
        self._compiling: set[str] = set()

    def close(self) -> None:
        if self._sweep:
            self._sweep.cancel()
        for job in chain.from_iterable(self._waiting.values()):
            job.leave()
        self._waiting.clear()

    async def of(
        self, options: GenerationOptions, tenant: str = "", wait: Callable[[bool], None] = lambda is_waiting: None
    ) -> TextGrammar | None:
        """Returns the grammar of a new text, or None if the options contain none.

        `wait`: called with True if the grammar takes longer, and with False once it exists. Raises InvalidInput for a
        grammar that is wrong or costs too much, and Overloaded if other grammars are being compiled.
        """
        if not (option := form_of(options)):
            return None
        value = getattr(options, option)
        job = self._job(tenant, option, json.dumps([*value]) if option == "choices" else str(value))
        if not job.compiled.done():
            await asyncio.wait([job.compiled], timeout=_SOON_S)  # cancels nothing
        if not job.compiled.done():
            wait(True)
            await _wait_for(job)
            wait(False)
        if job.compiled.cancelled():
            raise Overloaded("the grammars of other requests are being compiled", _COMPILE_LIMIT_S)
        compiled = job.compiled.result()
        if isinstance(compiled, NeuronpipeError):
            raise compiled.with_traceback(None)  # otherwise each caller would lengthen the traceback
        _, special_ids = self._tokenizer
        ends = {*GenerationFacts.of(self._spec).end_token_ids, *options.stop_token_ids}
        return TextGrammar(compiled.deep_copy(), option, self._spec.vocabulary_size, ends, special_ids)

    def _job(self, tenant: str, option: str, text: str) -> _GrammarJob:
        key = tenant, option, text
        job = self._kept.pop(key, None)
        if job is None or job.compiled.cancelled():
            job = _GrammarJob(option, text, asyncio.get_running_loop().create_future(), len(text))
            waiting = self._waiting.get(tenant, ())
            self._waiting[tenant] = deque([*(other for other in waiting if not other.compiled.cancelled()), job])
        job.used_s = time.monotonic()
        self._kept[key] = job
        self._free_superfluous(job.used_s)
        self._begin()
        return job

    def _free_superfluous(self, now_s: float) -> None:
        """Frees the grammars beyond the limits, now and when the least recently used grammar has been kept for long."""
        while oldest := self._superfluous(now_s):
            superfluous = self._kept.pop(oldest)
            superfluous.leave()
            self._free_later(superfluous)
        if self._kept and not self._sweep:
            self._sweep = asyncio.get_running_loop().call_later(_KEPT_S, self._end_sweep)

    def _end_sweep(self) -> None:
        self._sweep = None
        self._free_superfluous(time.monotonic())

    def _free_later(self, job: _GrammarJob) -> None:
        """Keeps a job until its turn to be freed: the timer refers to it."""
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        self._frees_last_s = min(max(self._frees_last_s, now_s) + _FREES_EVERY_S, now_s + _FREES_WITHIN_S)
        loop.call_at(self._frees_last_s, job.leave)

    def _superfluous(self, now_s: float) -> tuple[str, str, str] | None:
        """Returns the key of the grammar that makes room; None if there is room. The newest makes none for others."""
        oldest = next(iter(self._kept), None)
        if oldest and now_s - self._kept[oldest].used_s > _KEPT_S:
            return oldest
        if len(self._kept) <= _MAX_KEPT and sum(job.size for job in self._kept.values()) <= _MAX_KEPT_CHARACTERS:
            return None
        *older_keys, _ = self._kept
        parts = Counter[str]()
        for key in older_keys:
            parts[key[0]] += max(_MAX_KEPT_CHARACTERS // _MAX_KEPT, self._kept[key].size)
        return next((key for key in older_keys if key[0] == max(parts, key=lambda name: parts[name])), None)

    def _begin(self) -> None:
        """Compiles one grammar of each tenant at the same time, in turns if there are too many tenants."""
        for tenant in [name for name in self._waiting if name not in self._compiling]:
            if len(self._compiling) >= _PLACES:
                return
            jobs = self._waiting.pop(tenant)
            job = next((job for _ in range(len(jobs)) if not (job := jobs.popleft()).compiled.cancelled()), None)
            if jobs:
                self._waiting[tenant] = jobs
            if job:
                job.has_begun = True
                self._compiling.add(tenant)
                thread = ComputeThread(f"grammar-{self._spec.name}")
                ended = asyncio.wrap_future(thread.submit(partial(self._run, job)))
                ended.add_done_callback(partial(self._end, tenant, job))
                thread.close()
                _give_way_later(job)

    def _end(self, tenant: str, job: _GrammarJob, ended: "asyncio.Future[LLMatcher | NeuronpipeError]") -> None:
        self._compiling.remove(tenant)
        if error := ended.exception():
            job.compiled.set_exception(error)
        else:
            job.compiled.set_result(ended.result())
        self._free_superfluous(job.used_s)  # the size is known now
        self._begin()

    def _run(self, job: _GrammarJob) -> "LLMatcher | NeuronpipeError":
        job.spent_s, job.thread_id = _stopwatch(), threading.get_native_id()
        job.size = _written_out(job.text)
        return self._compiled(job.option, job.text)

    def _compiled(self, option: str, text: str) -> "LLMatcher | NeuronpipeError":
        """Compiles the grammar of a text without tokens, or returns the error of the grammar. Runs in a thread."""
        from llguidance import LLMatcher, LLParserLimits

        try:
            with self._reading:
                tokenizer, _ = self._tokenizer
            _check(option, text)
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


def _written_out(text: str) -> int:
    """Counts the characters of a grammar whose repetitions are written out, at most the expressions that it may have.

    A text that contains patterns is read like a pattern.
    """
    most, sizes, last, end = int(_LIMITS["initial_lexer_fuel"]), [0], 0, 0
    for match in _REPEATED.finditer(text):
        if match.start() > end:
            sizes[-1] += match.start() - end
            last = 1
        end, part = match.end(), match[0]
        if part == "(":
            sizes.append(0)
            continue
        if match[1]:
            last *= max(0, int(match[2] or match[1]) - 1)  # the first repetition is counted
        else:
            last = sizes.pop() if part == ")" and len(sizes) > 1 else 1
        last = min(last, most)
        sizes[-1] += last
    return min(most, sum(sizes) + len(text) - end)


def _give_way_later(job: _GrammarJob) -> None:
    """Gives a compilation the lowest priority once it takes long, so that the steps of all texts go before it."""
    if job.spent_s() > _SOON_S:
        give_way(job.thread_id)
    elif not job.compiled.done():
        asyncio.get_running_loop().call_later(_SOON_S, _give_way_later, job)


async def _wait_for(job: _GrammarJob) -> None:
    """Waits until a grammar is compiled or its compilation is given up. Raises InvalidInput after the time limit."""
    left_s = _COMPILE_LIMIT_S
    while not job.compiled.done():
        await asyncio.wait([job.compiled], timeout=max(left_s, _LOOKS_S))
        job.leave()
        left_s = _COMPILE_LIMIT_S - job.spent_s()
        if not job.compiled.done() and left_s <= 0:
            give_way(job.thread_id)
            raise InvalidInput(f"options.{job.option}", f"takes more than {_COMPILE_LIMIT_S:g} s to compile, the limit")


def _stopwatch() -> Callable[[], float]:
    """Makes a function that returns the CPU seconds of the calling thread since now, or the seconds that have passed if
    the system does not count them. It returns 0 once the thread has ended.
    """
    on_linux = sys.platform == "linux"
    clock = time.pthread_getcpuclockid(threading.get_ident()) if on_linux else time.CLOCK_MONOTONIC
    began_s = time.clock_gettime(clock)

    def spent_s() -> float:
        try:
            return time.clock_gettime(clock) - began_s
        except OSError:
            return 0.0

    return spent_s


def _written(option: str, text: str) -> str:
    """Writes the grammar in llguidance's form. Raises ValueError."""
    from llguidance import LLMatcher, grammar_from

    if option in ("json_schema", "json_object"):
        schema = json.dumps(_followed(json.loads(text))) if option == "json_schema" else '{"type": "object"}'
        return LLMatcher.grammar_from_json_schema(schema, overrides=_OF_JSON)
    if option == "choices":
        return grammar_from("choice", text)
    if option == "regex":
        return LLMatcher.grammar_from_regex(text)
    written, at = "", 0
    for begin, end, schema in _schemas_in(text, json.JSONDecoder()):
        followed = _followed(schema)
        written += text[at:begin] + json.dumps(followed | {"x-guidance": _OF_JSON} if followed else followed)
        at = end
    return LLMatcher.grammar_from_lark(written + text[at:])


def _schemas_in(grammar: str, decoder: json.JSONDecoder) -> Iterator[tuple[int, int, Any]]:
    """Yields the schemas of a grammar in Lark, each with its place. Raises ValueError."""
    at = 0
    while place := _JSON_IN_LARK.search(grammar, at):
        schema, at = decoder.raw_decode(grammar, place.end())
        yield place.end(), at, schema


def _followed(schema: Any) -> Any:
    """Expresses the formats of a schema in keywords that llguidance knows. Drops keywords that say nothing.

    `uniqueItems` is omitted, because llguidance cannot follow it: the model decides whether items repeat.
    """
    if isinstance(schema, list):
        return [_followed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    followed: dict[str, Any] = {}
    for name, value in schema.items():
        if name in BY_NAME and isinstance(value, dict):
            followed[name] = {key: _followed(inner) for key, inner in value.items()}
        elif (name, value) != _ANY_NAMES and name != "uniqueItems":
            followed[name] = value if name in ("const", "enum") else _followed(value)
    if isinstance(pattern := schema.get("pattern"), str) and pattern.startswith(_DECIMAL):
        followed["pattern"] = _decimal(pattern)
    name = schema.get("format")
    if isinstance(name, str) and name in _ALSO:
        followed["format"] = _ALSO[name]
        if not followed["format"]:
            del followed["format"]
    if isinstance(name, str) and name in _FORMATS:
        own_schemas = [{"allOf": followed["allOf"]}] if "allOf" in followed else []
        followed["allOf"] = [*own_schemas, *({"pattern": pattern} for pattern in _FORMATS[name])]
    return followed


def _decimal(pattern: str) -> str:
    """Writes a pattern without look-ahead for pydantic's pattern of a Decimal.

    Both patterns accept the same texts: numbers with a digit before the decimal point and, if it exists, behind it.
    """
    whole, places = (
        int(match[1]) if (match := re.search(limit, pattern)) else None
        for limit in (r"\\d\{0,(\d+)\}\|", r"\.\??\\d\{0,(\d+)\}0\*\$\)?$")
    )
    if whole is None:
        fraction = "" if places == 0 else r"(\.\d+)?" if places is None else rf"(\.\d{{1,{places}}})?"
        return rf"^[+-]?\d+{fraction}$"
    if places is not None:
        digits = int(match[1]) - 1 if (match := re.search(r"\]\{1,(\d+)\}", pattern)) else 0
        places = min(places, digits)
        fraction = rf"(\.\d{{1,{places}}})?" if places else ""
        before = rf"\d{{1,{whole}}}" if whole else "0"
        return f"^[+-]?{before}{fraction}$"
    if whole > _MAX_DIGITS:
        return pattern  # llguidance refuses it
    parted = "".join(rf"|\d{{{count}}}\.\d{{1,{whole - count}}}" for count in range(1, whole))
    return rf"^[+-]?(\d{{1,{whole}}}{parted})$"


def _check(option: str, text: str) -> None:
    """Raises ValueError for grammars that llguidance would follow wrongly, or at a cost that it does not count, and for
    schemas that are not JSON.
    """
    if option == "regex" and (len(text) - len(text.rstrip("\\"))) % 2:
        raise ValueError("it ends within an escape")
    decoder = json.JSONDecoder(parse_float=Decimal, parse_int=_whole_number)
    schemas: list[Any] = [decoder.decode(text)] if option == "json_schema" else []
    if option == "grammar":
        schemas += [schema for _, _, schema in _schemas_in(text, decoder)]
    if option == "grammar" and _QUOTED.sub("", text).count("&") > _MAX_INTERSECTIONS:
        raise ValueError(f"it has more than {_MAX_INTERSECTIONS} intersections (&), the limit")
    works = [SchemaWork(schema, _PATTERNS_OF) for schema in schemas]
    units = sum(work.units for work in works)
    if units > MOST_WORK:
        raise ValueError(
            f"to compile it would cost {units:.3g}, the limit is {MOST_WORK:.3g}: properties of each object, squared, "
            "for each combination that anyOf and allOf leave"
        )
    if (most := max([work.most_next for work in works], default=0)) > MOST_NEXT:
        raise ValueError(f"{most} properties may come next in a text, the limit is {MOST_NEXT}: require some of them")
    states = Decimal(0)
    for schema in chain.from_iterable(map(_parts, schemas)):
        if not isinstance(schema, dict) or not schema:
            continue
        if isinstance(multiple := schema.get("multipleOf"), int | Decimal):
            states += _states(Decimal(multiple))
        for keyword in (name for name in _WITH_NUMBERS if name in schema):
            for number in _parts(schema[keyword]):
                if isinstance(number, int | Decimal) and not _is_exact(Decimal(number).copy_abs(), keyword in _BOUNDS):
                    raise ValueError(f"{keyword} has a number beyond {_MAX_EXACT} that a float of 64 bits has not")
        least, required = schema.get("minProperties"), schema.get("required")
        named = len({*map(str, required)}) if isinstance(required, list) else 0
        if isinstance(least, int) and least > named + 1:
            raise ValueError(f"minProperties of {least} and {named} required ones, others may have the same name")
    if states > _MAX_MULTIPLES:
        raise ValueError(
            f"the values of multipleOf add up to more than {_MAX_MULTIPLES}, in units of their last digits"
        )


def _whole_number(digits: str) -> int:
    if len(digits) > _MAX_NUMBER_DIGITS:
        raise ValueError(f"it has a number of {len(digits)} digits, the limit is {_MAX_NUMBER_DIGITS}")
    return int(digits)


def _parts(value: Any) -> Iterator[Any]:
    """Yields a value of JSON, and all values that it contains."""
    yield value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _parts(part)


def _states(multiple: Decimal) -> Decimal:
    if abs(multiple.adjusted()) > 20:  # too large to compute with
        return Decimal("inf")
    exponent = multiple.normalize().as_tuple().exponent
    return abs(multiple.scaleb(-exponent) if isinstance(exponent, int) and exponent < 0 else multiple)


def _is_exact(number: Decimal, is_bound: bool) -> bool:
    if number >= _MAX_INT64:
        return is_bound or number == _MAX_INT64
    return number <= _MAX_EXACT or Decimal(float(number)) == number


def _refusal(option: str, matcher: "LLMatcher") -> InvalidInput:
    reason = matcher.get_error().removesuffix("<non-verbose/>")
    if "too many expressions" in reason or "grammar) too big" in reason:
        reason = f"with its repetitions written out, it has more than {_LIMITS['initial_lexer_fuel']:,} expressions"
    return _invalid(option, "no text has it" if reason.startswith("NoExtension") else reason)


def _invalid(option: str, reason: str) -> InvalidInput:
    return InvalidInput(f"options.{option}", f"cannot be followed: {' '.join(reason.split())[:_MAX_REASON]}")
