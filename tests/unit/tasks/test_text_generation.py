"""tasks/text_generation.py: what no executor makes of a prompt is refused by the name of its array."""

import re
import string
from typing import Any

import numpy as np
import pytest

from neuronpipe.api.v1.tasks_pb2 import ChatMessage, FinishReason, GenerationOptions, TextGenerationInput
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.generated import TokenLogprobs
from neuronpipe.core.tensors import Array
from neuronpipe.tasks.generated_text import Detokenizer
from neuronpipe.tasks.text_generation import TASK, decode, logprob_arrays, part_arrays, prompt_arrays, window_arrays
from tests.unit.model_specs import model_spec
from tests.unit.tasks.word_tokenizer import WordTokenizer

_MODEL = model_spec("text_generation", max_tokens=4, vocabulary_size=26)
_LETTERS = Detokenizer(lambda ids: "".join(string.ascii_lowercase[id] for id in ids))
_INPUT = TextGenerationInput(options=GenerationOptions(top_logprobs=2, prompt_logprobs=True))
_ONE = TokenLogprobs(-0.5, (3, 4), (-0.5, -1.5))
_INT, _FLOAT = np.int32, np.float32


def _outputs(**changes: Any) -> dict[str, Array]:
    """Two tokens behind a prompt of three, of which the last two have log probabilities; None for no such array."""
    made = {
        **part_arrays([0, 1], FinishReason.FINISH_REASON_END)[0],
        **logprob_arrays([_ONE, _ONE]),
        **prompt_arrays([5, 6, 7], [_ONE, _ONE]),
        "score": np.array(-2.5, _FLOAT),
    }
    return {name: array for name, array in {**made, **changes}.items() if array is not None}


def _decoded(outputs: dict[str, Array]) -> Any:
    return decode(_INPUT, _MODEL, window_arrays([5, 6, 7]), [outputs], _LETTERS).sequences[0]


def test_what_an_executor_makes_is_decoded() -> None:
    text = _decoded(_outputs())
    assert (text.text, text.score, [*text.token_ids]) == ("ab", -2.5, [0, 1])
    assert text.finish_reason == FinishReason.FINISH_REASON_END
    expected = [("a", -0.5, ["d", "e"]), ("b", -0.5, ["d", "e"])]
    assert [(logprob.text, logprob.logprob, [top.text for top in logprob.top]) for logprob in text.logprobs] == expected
    assert [(logprob.text, logprob.logprob, len(logprob.top)) for logprob in text.prompt_logprobs] == [
        ("f", 0.0, 0),  # nothing is before it
        ("g", -0.5, 2),
        ("h", -0.5, 2),
    ]


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("token_ids", None),
        ("token_ids", np.array([0, 1], np.int64)),
        ("token_ids", np.array([[0, 1]], _INT)),
        ("token_ids", np.array([0] * 5, _INT)),  # more than the model takes
        ("token_ids", np.array([0, 26], _INT)),
        ("token_ids", np.array([-1, 1], _INT)),
        ("finish_reason", None),
        ("finish_reason", np.array(1, np.int64)),
        ("finish_reason", np.array([1], _INT)),
        ("finish_reason", np.array(99, _INT)),
        ("score", np.array(1, np.float64)),
        ("score", np.array([1], _FLOAT)),
        ("logprobs", None),
        ("logprobs", np.zeros(2, np.float64)),
        ("logprobs", np.zeros(3, _FLOAT)),
        ("top_ids", None),
        ("top_ids", np.zeros((2, 2), np.int64)),
        ("top_ids", np.zeros((3, 2), _INT)),
        ("top_ids", np.zeros(2, _INT)),
        ("top_ids", np.full((2, 2), -1, _INT)),
        ("top_logprobs", None),
        ("top_logprobs", np.zeros((2, 2), np.float64)),
        ("top_logprobs", np.zeros((2, 3), _FLOAT)),
        ("prompt_ids", np.zeros(0, _INT)),
        ("prompt_ids", np.zeros((3, 1), _INT)),
        ("prompt_ids", np.zeros(3, _FLOAT)),
        ("prompt_ids", np.array([5, -6, 7], _INT)),
        ("prompt_ids", np.array([5, 6, 26], _INT)),
        ("prompt_ids", np.zeros(5, _INT)),
        ("prompt_logprobs", None),
        ("prompt_top_ids", np.zeros((3, 2), _INT)),
        ("prompt_top_logprobs", np.zeros((2, 3), _FLOAT)),
    ],
    ids=lambda value: value if isinstance(value, str) else "none" if value is None else f"{value.dtype}{value.shape}",
)
def test_what_no_executor_makes_is_refused_by_its_name(name: str, array: Array | None) -> None:
    with pytest.raises(InvalidInput, match=rf"^outputs\[0\]\.{name}: "):
        _decoded(_outputs(**{name: array}))


def test_more_alternatives_than_any_request_may_ask_for_are_refused() -> None:
    wide = {"top_ids": np.zeros((2, 21), _INT), "top_logprobs": np.zeros((2, 21), _FLOAT)}
    with pytest.raises(InvalidInput, match=r"^outputs\[0\]\.top_logprobs: .* n of at most 20"):
        _decoded(_outputs(**wide))


def test_tokens_beyond_the_vocabulary_may_be_alternatives() -> None:
    """A model may have scores for more tokens than exist."""
    skips = Detokenizer(_LETTERS.text_of, lambda token_id: token_id >= 26)
    outputs = [_outputs(top_ids=np.full((2, 2), 30, _INT))]
    (text,) = decode(_INPUT, _MODEL, window_arrays([5]), outputs, skips).sequences
    assert [(top.token_id, top.text) for top in text.logprobs[0].top] == [(30, "")] * 2


@pytest.mark.parametrize("name", ["messages[0]", "tools", "template_arguments", "options.json_schema"])
def test_json_that_is_nested_too_deeply_is_refused_by_its_fields_name(name: str) -> None:
    deep = '{"a":' * 600 + "0" + "}" * 600
    model = model_spec("text_generation", chat_template="{{ messages }} {{ tools }}", end_token_ids=(1,))
    message = ChatMessage(role="user", content="a", fields=deep if name == "messages[0]" else "")
    input = TextGenerationInput(messages=[message])
    if name in ("tools", "template_arguments"):
        setattr(input, name, f"[{deep}]" if name == "tools" else deep)
    if name == "options.json_schema":
        input.options.json_schema = deep
    with pytest.raises(InvalidInput, match=rf"^{re.escape(name)}: lists and objects are nested more than 128 deep"):
        TASK.check(input, model)


_SAID = [ChatMessage(role="user", content="a b c")]  # four tokens, and two special ones


@pytest.mark.parametrize(
    ("fields", "max_tokens", "problem"),
    [
        ({"messages": _SAID}, 6, "messages: 6 tokens, which leave no room for a text: the model takes 6; send less"),
        ({"prompt": "a b c d e"}, 6, "prompt: 7 tokens, .*: the model takes 6; set truncation to cut"),
        ({"prompt_token_ids": [3] * 6}, 6, "prompt: 6 tokens, .*: the model takes 6; set truncation to cut"),
        ({"messages": _SAID}, 7, "messages: 6 tokens and 3 new ones, the model takes 7 together; lower max_new_tokens"),
    ],
    ids=str,
)
def test_only_a_prompt_that_leaves_room_is_advised_to_ask_for_fewer_tokens(
    fields: dict[str, Any], max_tokens: int, problem: str
) -> None:
    model = model_spec("text_generation", max_tokens=max_tokens)
    input = TextGenerationInput(**fields, options=GenerationOptions(max_new_tokens=3))
    with pytest.raises(InvalidInput, match=f"^{problem}$"):
        TASK.encode(input, WordTokenizer(), model)
