"""The options of tasks that generate: each is declared here once.

The checks of requests (tasks/text_options.py), models' own values, the forms of doors, the client's arguments, the
flags of `neuronpipe generate` and the table of docs/generation.md are made of these entries. A new option is a field of
GenerationOptions (tasks.proto), an entry here, and the algorithm that applies it (stages/neuron_executor/generation/).
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, get_args

from neuronpipe.core.errors import InvalidInput

if TYPE_CHECKING:
    from neuronpipe.api.v1.tasks_pb2 import EarlyStopping

# The forms of values. words: one of three words. token: a token's id; tokens: a list of them; sequences: several lists.
# json: a value as JSON. biases: numbers by tokens' ids.
OptionKind = Literal["int", "float", "bool", "words", "token", "text", "json", "texts", "tokens", "sequences", "biases"]
_NONE: Any = object()
# The name of an option in another protocol that is its own name.
_SAME = "="
_MAX_UINT32, _MAX_UINT64 = (1 << 32) - 1, (1 << 64) - 1
_POSITIVE = math.ulp(0.0)
EARLY_STOPPING_WORDS = ("false", "true", "never")


@dataclass(frozen=True, slots=True)
class Option:
    """An option. Its name is the name of its field in GenerationOptions, and in transformers.

    - `text`: its meaning, for the command line and the documentation.
    - `minimum`, `maximum`: the bounds of a number; the bounds of its type where the model limits it.
    - `max_items`: the most elements of a list. `max_size`: the most characters or tokens of an element, or of a text.
    - `draws`: the option has an effect with do_sample only.
    - `default`: the value of a model whose generation_config has none. Without it, models have no value of their own.
    - `openai`: the name in OpenAI's or vLLM's requests, if it is another; empty: they do not have the option.
    - `huggingface`: whether requests of Hugging Face and of TGI may have it.
    """

    text: str
    kind: OptionKind = "int"
    minimum: float = 0
    maximum: float = _MAX_UINT32
    max_items: int = 0
    max_size: int = 0
    draws: bool = False
    default: Any = _NONE
    openai: str = _SAME
    huggingface: bool = True

    @property
    def has_default(self) -> bool:
        """Whether models may have a value of their own that requests without one get."""
        return self.default is not _NONE

    @property
    def bounds(self) -> str:
        """The valid numbers; empty if the type says them."""
        if self.kind not in ("int", "float") or self.maximum >= _MAX_UINT32:
            return ""
        if self.minimum == _POSITIVE:
            return f"more than 0, and at most {self.maximum:g}"
        return f"{self.minimum:g} to {self.maximum:g}"


class GenerationFields(TypedDict, total=False):
    """The fields of GenerationOptions, which has a comment for each."""

    max_new_tokens: Annotated[
        int, Option("the most tokens to generate (default: the model's own, or 256)", minimum=1, openai="")
    ]
    min_new_tokens: Annotated[int, Option("tokens before the text may end", default=0, openai="min_tokens")]
    do_sample: Annotated[
        bool, Option("draw tokens at random; without it, the most probable token is taken", "bool", openai="")
    ]
    temperature: Annotated[float, Option("divide logits by it", "float", _POSITIVE, 100, draws=True, default=1.0)]
    top_k: Annotated[int, Option("draw from the best N tokens; 0: from all", draws=True, default=50)]
    top_p: Annotated[
        float,
        Option(
            "draw from the best tokens whose probabilities add up to it; 0: only the best token",
            "float",
            0,
            1,
            draws=True,
            default=1.0,
        ),
    ]
    min_p: Annotated[
        float,
        Option(
            "draw from tokens with at least this share of the best token's probability",
            "float",
            0,
            1,
            draws=True,
            default=0.0,
        ),
    ]
    seed: Annotated[
        int, Option("the same seed gives the same text, alone and in any batch", maximum=_MAX_UINT64, draws=True)
    ]
    repetition_penalty: Annotated[
        float, Option("make tokens of prompt and text less probable; 1: no change", "float", 0.01, 100, default=1.0)
    ]
    no_repeat_ngram_size: Annotated[int, Option("never repeat N tokens in a row; 0: may repeat", default=0, openai="")]
    stop_strings: Annotated[
        Iterable[str],
        Option("end the text before the first of these", "texts", max_items=16, max_size=256, openai="stop"),
    ]
    stop_token_ids: Annotated[
        Iterable[int],
        Option("end the text after one of these tokens, as after the model's own", "tokens", max_items=64),
    ]
    bad_words_ids: Annotated[
        Iterable[Iterable[int]],
        Option(
            "words that the text must not contain, each as its tokens",
            "sequences",
            max_items=64,
            max_size=32,
            openai="",
        ),
    ]
    forced_bos_token_id: Annotated[int, Option("the first token of the text", "token", default=None, openai="")]
    forced_eos_token_id: Annotated[
        int, Option("the last token of a text of `max_new_tokens`", "token", default=None, openai="")
    ]
    num_beams: Annotated[int, Option("search with N beams for the best text, which comes as a whole", "int", 1, 16)]
    length_penalty: Annotated[
        float, Option("with `num_beams`: more than 0 prefers longer texts", "float", -10, 10, default=1.0)
    ]
    early_stopping: Annotated[
        "EarlyStopping.ValueType", Option("with `num_beams`: when the search ends (default: false)", "words")
    ]
    num_return_sequences: Annotated[
        int,
        Option(
            "number of texts: with `num_beams` the best texts, with `do_sample` separate draws",
            "int",
            1,
            16,
            openai="n",
        ),
    ]
    top_logprobs: Annotated[
        int,
        Option(
            "log probabilities of each token, and of the N best tokens at its place",
            "int",
            0,
            20,
            huggingface=False,
            openai="",
        ),
    ]
    logit_bias: Annotated[
        Mapping[int, float],
        Option("add to the logits of tokens", "biases", -100, 100, max_items=1024, huggingface=False),
    ]
    presence_penalty: Annotated[
        float, Option("subtract from the logits of tokens that the text contains", "float", -2, 2)
    ]
    frequency_penalty: Annotated[
        float,
        Option("subtract from the logits of tokens, once for each time that the text contains them", "float", -2, 2),
    ]
    prompt_logprobs: Annotated[
        bool,
        Option(
            "with `top_logprobs`: also the log probabilities of the prompt's tokens",
            "bool",
            huggingface=False,
            openai="",
        ),
    ]
    skip_special_tokens: Annotated[bool, Option("leave special tokens out of the text (default: true)", "bool")]
    json_schema: Annotated[
        str | Mapping[str, Any],
        Option("write JSON that is valid by this JSON Schema", "json", max_size=65_536, openai="guided_json"),
    ]
    json_object: Annotated[bool, Option("write a JSON object", "bool", openai="guided_json_object")]
    regex: Annotated[
        str, Option("write a text that matches this regular expression", "text", max_size=4096, openai="guided_regex")
    ]
    choices: Annotated[
        Iterable[str], Option("write one of these texts", "texts", max_items=256, max_size=256, openai="guided_choice")
    ]
    grammar: Annotated[
        str,
        Option(
            "write a text of this grammar, in llguidance's variant of Lark",
            "text",
            max_size=65_536,
            openai="guided_grammar",
            huggingface=False,
        ),
    ]


_DECLARED = {name: get_args(kind)[1] for name, kind in GenerationFields.__annotations__.items()}
OPTIONS: Mapping[str, Option] = {
    name: replace(option, openai=name) if option.openai == _SAME else option for name, option in _DECLARED.items()
}
# The options that have an effect with do_sample only.
DRAWING = tuple(name for name, option in OPTIONS.items() if option.draws)
# The forms that a text may be required to have. A request may name one of them.
FORMS = ("json_schema", "json_object", "regex", "choices", "grammar")


def with_drawing(options: dict[str, Any], *, is_drawn: bool = False) -> dict[str, Any]:
    """Returns options as OpenAI means them: any option of drawing sets do_sample; a temperature of 0 resets it."""
    if options.get("temperature") == 0:
        return {"do_sample": False} | {name: value for name, value in options.items() if name not in DRAWING}
    return options | {"do_sample": True} if is_drawn or any(name in DRAWING for name in options) else options


def message_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Converts values of Python, JSON and the command line to fields of GenerationOptions. Raises InvalidInput."""
    try:
        return {name: _field(OPTIONS[name], value) for name, value in values.items()}
    except RecursionError as error:
        raise InvalidInput("options.json_schema", "is nested too deeply") from error


def _biases(numbers_by_token: Mapping[Any, float]) -> list[dict[str, Any]]:
    """Converts numbers by tokens' ids, which are strings in JSON. Raises InvalidInput."""
    try:
        return [{"token_id": int(token_id), "bias": number} for token_id, number in numbers_by_token.items()]
    except (ValueError, TypeError, AttributeError) as error:
        raise InvalidInput("options.logit_bias", "must be an object with ids of tokens for names") from error


def _field(option: Option, value: Any) -> Any:
    if option.kind == "sequences":
        return [{"token_ids": word} for word in value]
    if option.kind == "biases":
        return _biases(value)
    if option.kind == "texts" and isinstance(value, str):
        return [value]
    if option.kind == "json" and not isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if option.kind == "words" and str(value).lower() in EARLY_STOPPING_WORDS:
        return f"EARLY_STOPPING_{str(value).upper()}"
    return value
