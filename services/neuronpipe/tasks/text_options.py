"""The options of generated texts: the defaults of a model, the checks of a request, and its completed options."""

import random
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import chain
from typing import Any, ClassVar, Literal

from pydantic import Field

from neuronpipe.api.v1.tasks_pb2 import EarlyStopping, GenerationOptions, TokenSequence
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.generation_options import DRAWING, FORMS, OPTIONS, Option
from neuronpipe.core.model import ModelSpec, TaskFacts, with_fields
from neuronpipe.core.parsing import check_depth

# The default of a model without its own value. transformers' pipeline has the same default.
_MAX_NEW_TOKENS = 256
# The number of schemas and grammars whose last check is remembered.
_CHECKED_FORMS = 4
_MODEL_DEFAULTS = {
    name: (type(option.default) if option.default is not None else int | None, option.default)
    for name, option in OPTIONS.items()
    if option.has_default
}
# Texts before and behind the reasoning of a model, where they are no special tokens: Qwen, DeepSeek; Magistral.
REASONING_MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
# Texts before and behind a call of Hermes and Qwen.
CALL_MARKS = ("<tool_call>", "</tool_call>")


def reasoning_marks_of(template: str) -> tuple[str, str] | None:
    """Returns the texts before and behind the reasoning by a template; None for a template without reasoning."""
    return next((marks for marks in REASONING_MARKS if marks[1] in template), None)


@with_fields(_MODEL_DEFAULTS)
class GenerationFacts(TaskFacts):
    """Facts about a model that generates: its generation_config, with fields for all options, its chat template."""

    encoded: ClassVar[tuple[str, ...]] = ("chat_template", "template_variables", "prefix")
    public_fields: ClassVar[tuple[str, ...]] = ("has_chat_template",)

    chat_template: str = Field(
        "", description="jinja template that makes a prompt of messages; empty: the model takes none"
    )
    template_variables: Mapping[str, str] = Field({}, description="special tokens by their names in the template")
    end_token_ids: tuple[int, ...] = Field((), description="tokens that end a text (eos_token_id)")
    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    max_length: int | None = Field(
        None, description="maximum number of tokens, prompt included, instead of max_new_tokens"
    )
    min_length: int = Field(0, description="minimum number of tokens, prompt included, instead of min_new_tokens")
    do_sample: bool = False
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()
    encoder_no_repeat_ngram_size: int = 0
    sequence_bias: tuple[tuple[tuple[int, ...], float], ...] = ()
    exponential_decay_length_penalty: tuple[int, float] | None = None
    renormalize_logits: bool = False
    num_beams: int = 1
    early_stopping: bool | Literal["never"] = False
    decoder_start_token_ids: tuple[int, ...] = Field(
        (), description="tokens before every generated text, in a model with an encoder"
    )
    prefix: str = Field("", description="text that is put before every text, in a model with an encoder")
    max_text_tokens: int = Field(0, description="maximum number of tokens of a text, in a model with an encoder")
    opens_reasoning: tuple[Literal["default", "on", "off"], ...] = Field(
        (), description="settings of a template's thinking with which the prompt ends in the model's reasoning"
    )
    read_variables: tuple[str, ...] | None = Field(
        None, description="variables that the chat template reads; none: a bundle that does not say"
    )
    reasoning_end_id: int | None = Field(
        None, description="the token that is the mark behind the reasoning; none: several tokens, or unknown"
    )
    call_mark_ids: tuple[int, ...] | None = Field(
        None, description="the tokens that are CALL_MARKS; empty: several tokens each; none: unknown, or no such marks"
    )

    def reads_any(self, variables: Iterable[str]) -> bool:
        """Returns whether the chat template may read one of these variables."""
        return self.read_variables is None or not {*self.read_variables}.isdisjoint(variables)

    @property
    def reasoning_marks(self) -> tuple[str, str] | None:
        """The texts before and behind the reasoning of a model, by its template; None for a model without reasoning."""
        return reasoning_marks_of(self.chat_template)

    @property
    def has_chat_template(self) -> bool:
        return bool(self.chat_template)

    def default_of(self, option: str) -> Any:
        return getattr(self, option)


def check_all_options(options: GenerationOptions, model: ModelSpec) -> None:
    check_options(options, model)
    facts = GenerationFacts.of(model)
    samples, beams, texts = _samples(options, facts), _num_beams(options, facts), options.num_return_sequences
    for name in DRAWING if not samples else ():
        if name in _given(options):
            problem = "has an effect only with do_sample; set do_sample to true"
            raise InvalidInput(f"options.{name}", problem, ["options.do_sample"] * 2)
    if form := form_of(options):
        for name in ("forced_bos_token_id", "forced_eos_token_id"):
            if name in _given(options):
                raise InvalidInput(f"options.{name}", f"cannot be combined with {form}", [f"options.{form}"])
        if not facts.end_token_ids:
            raise InvalidInput(f"options.{form}", f"model {model.name!r} has no token that ends a text")
    if options.prompt_logprobs:
        if not options.HasField("top_logprobs"):
            problem = "has an effect only with top_logprobs"
            raise InvalidInput("options.prompt_logprobs", problem, ["options.top_logprobs"])
        if texts > 1 or beams > 1 or options.stop_strings or facts.decoder_start_token_ids:
            problem = "is for one text of a prompt, without beams and stop_strings"
            raise InvalidInput("options.prompt_logprobs", problem, ["options.stop_strings"])
    if texts > 1 and beams == 1 and not samples:
        problem = "more than 1 text need do_sample or num_beams; set one"
        raise InvalidInput("options.num_return_sequences", problem, ["options.do_sample", "options.num_beams"])
    if texts > beams > 1:
        advice = "; with num_beams 1, each is drawn by itself" if samples else ""
        problem = f"{texts}, must be at most num_beams, {beams}{advice}"
        raise InvalidInput("options.num_return_sequences", problem, ["options.num_beams"] * (2 if samples else 1))


def form_of(options: GenerationOptions) -> str:
    """Returns the field that sets the form of the text, or an empty string. Raises InvalidInput if several are set."""
    forms = [name for name in FORMS if getattr(options, name)]
    if len(forms) > 1:
        raise InvalidInput(f"options.{forms[1]}", f"cannot be combined with {forms[0]}")
    return forms[0] if forms else ""


def _samples(options: GenerationOptions, facts: GenerationFacts) -> bool:
    """Returns whether tokens are drawn. A request for a search and for nothing else gets the best text."""
    return options.do_sample if options.HasField("do_sample") else facts.do_sample and options.num_beams <= 1


def is_drawn(options: GenerationOptions, model: ModelSpec) -> bool:
    """Returns whether equal requests get different texts: tokens are drawn, and no seed is set. Checks no option."""
    return _samples(options, GenerationFacts.of(model)) and not options.HasField("seed")


def _num_beams(options: GenerationOptions, facts: GenerationFacts) -> int:
    """Returns the number of texts that are searched side by side. Stop strings disable the model's own search."""
    default_beams = 1 if options.stop_strings else facts.num_beams
    return options.num_beams if options.HasField("num_beams") else default_beams


def check_options(options: GenerationOptions, model: ModelSpec) -> None:
    """Checks the values of the fields that are set. Raises InvalidInput."""
    _check_lengths(options, model)
    for field, value in options.ListFields():
        _check_value(f"options.{field.name}", OPTIONS[field.name], value, model)
    if options.num_beams > 1 and options.stop_strings:
        problem = "cannot be combined with num_beams, which searches tokens and knows no text; use stop_token_ids"
        raise InvalidInput("options.stop_strings", problem, ["options.num_beams", "options.stop_token_ids"])


def room_after(model: ModelSpec, prompt_tokens: int) -> int:
    """Returns the maximum number of tokens of a text after a prompt of `prompt_tokens` tokens."""
    return GenerationFacts.of(model).max_text_tokens or model.max_tokens - prompt_tokens


def _check_lengths(options: GenerationOptions, model: ModelSpec) -> None:
    room = room_after(model, 1)
    if options.HasField("max_new_tokens") and not 1 <= options.max_new_tokens <= room:
        takes = f": the model takes {model.max_tokens} tokens, the prompt included" if room < model.max_tokens else ""
        raise InvalidInput("options.max_new_tokens", f"{options.max_new_tokens}, must be 1 to {room}{takes}")
    if options.HasField("max_new_tokens") and options.min_new_tokens > options.max_new_tokens:
        problem = f"{options.min_new_tokens}, more than max_new_tokens, {options.max_new_tokens}"
        raise InvalidInput("options.min_new_tokens", problem, ["options.max_new_tokens"])
    if options.min_new_tokens > room:
        raise InvalidInput("options.min_new_tokens", f"{options.min_new_tokens}, must be at most {room}")


def _check_value(place: str, option: Option, value: Any, model: ModelSpec) -> None:
    """Checks the value of a field by the declaration of its option."""
    if option.bounds and not option.minimum <= value <= option.maximum:  # also true for NaN
        raise InvalidInput(place, f"{value:g}, must be {option.bounds}")
    if option.kind == "words" and value not in EarlyStopping.values():
        raise InvalidInput(place, f"{value} is not known")
    if option.kind in ("text", "json") and not 1 <= len(value) <= option.max_size:
        raise InvalidInput(place, f"{len(value)} characters, must be 1 to {option.max_size}")
    if option.kind == "json":
        _check_depth(place, value)
    if option.max_items and len(value) > option.max_items:
        raise InvalidInput(place, f"{len(value)}, the limit is {option.max_items}")
    sequences = [item.token_ids for item in value] if option.kind == "sequences" else []
    for item in value if option.kind == "texts" else sequences:
        if not 1 <= len(item) <= option.max_size:
            unit = "characters" if option.kind == "texts" else "tokens"
            raise InvalidInput(place, f"one has {len(item)} {unit}, must have 1 to {option.max_size}")
    biases = value if option.kind == "biases" else ()
    if wrong := [bias.bias for bias in biases if not option.minimum <= bias.bias <= option.maximum]:
        raise InvalidInput(place, f"{wrong[0]:g}, must be {option.minimum} to {option.maximum}")
    biased = (bias.token_id for bias in biases)
    ids = {"token": [value], "tokens": value, "sequences": chain(*sequences), "biases": biased}.get(option.kind, ())
    if (largest := max(ids, default=-1)) >= model.vocabulary_size:
        raise InvalidInput(place, f"the id {largest}, the vocabulary has {model.vocabulary_size}")


# The tokenizer and the engine check each request. A check of the largest schema takes 3.4 ms (2026-11-30). An error is
# not remembered.
@lru_cache(_CHECKED_FORMS)
def _check_depth(place: str, text: str) -> None:
    check_depth(place, text.encode())


def _given(options: GenerationOptions) -> set[str]:
    return {field.name for field, _ in options.ListFields()}


def complete_options(options: GenerationOptions, model: ModelSpec, prompt_tokens: int) -> GenerationOptions:
    """Sets every field of checked options. Raises InvalidInput if the prompt is as long as the model's max_length."""
    facts, room = GenerationFacts.of(model), room_after(model, prompt_tokens)
    complete = GenerationOptions()
    complete.CopyFrom(options)
    if not options.HasField("max_new_tokens"):
        complete.max_new_tokens = min(_default_new_tokens(options, facts, prompt_tokens), room)
    named = _given(options)
    for name in _MODEL_DEFAULTS:
        if name not in named and (value := facts.default_of(name)) is not None:
            setattr(complete, name, value)
    if "min_new_tokens" not in named and not facts.min_new_tokens:
        complete.min_new_tokens = max(0, facts.min_length - prompt_tokens)
    # A model's own minimum may be above the maximum of the request.
    complete.min_new_tokens = min(complete.min_new_tokens, complete.max_new_tokens)
    complete.do_sample, complete.num_beams = _samples(options, facts), _num_beams(options, facts)
    if not options.early_stopping:
        complete.early_stopping = EarlyStopping.Value(f"EARLY_STOPPING_{str(facts.early_stopping).upper()}")
    if not options.bad_words_ids:
        complete.bad_words_ids.extend(TokenSequence(token_ids=word) for word in facts.bad_words_ids)
    if not options.HasField("seed"):
        complete.seed = random.getrandbits(64)
    return complete


def most_generated(options: GenerationOptions, model: ModelSpec, prompt_tokens: int = 1) -> int:
    """Returns the maximum number of tokens that a request, which may be unchecked, generates in all texts or beams."""
    facts, max_new_tokens = GenerationFacts.of(model), options.max_new_tokens
    if not options.HasField("max_new_tokens"):
        max_new_tokens = _default_new_tokens(options, facts, prompt_tokens)
    texts = max(_num_beams(options, facts), options.num_return_sequences, 1)
    return min(max_new_tokens, room_after(model, prompt_tokens)) * min(texts, int(OPTIONS["num_beams"].maximum))


def _default_new_tokens(options: GenerationOptions, facts: GenerationFacts, prompt_tokens: int) -> int:
    """Returns the maximum number of new tokens for a request without max_new_tokens."""
    if facts.max_new_tokens or facts.max_length is None:
        return facts.max_new_tokens or max(_MAX_NEW_TOKENS, options.min_new_tokens)
    if prompt_tokens >= facts.max_length:
        raise InvalidInput(
            "options.max_new_tokens",
            f"is missing, and the prompt has {prompt_tokens} tokens: the model's own max_length is {facts.max_length}, "
            "the prompt included",
        )
    return facts.max_length - prompt_tokens
