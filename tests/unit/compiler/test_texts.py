"""compiler/tasks/texts.py: what a template says of a model's reasoning."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from neuronpipe.compiler.tasks.texts import chat_facts

_BEGIN = "{% for message in messages %}{{ message.content }}</think>{% endfor %}{% if add_generation_prompt %}A: "
_QWEN_3 = "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
_QWEN_35 = "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% else %}<think>{% endif %}"
_DEEPSEEK_31 = "{% if not thinking %}</think>{% else %}<think>{% endif %}"


@pytest.mark.parametrize(
    ("end", "opens"),
    [
        ("<think>\n", ["default", "on", "off"]),  # DeepSeek R1, Qwen3 2507
        (_QWEN_3, []),
        (_QWEN_35, ["default", "on"]),
        (_DEEPSEEK_31, ["on"]),
        ("", []),
        ("{{ raise_exception('no') }}<think>", []),
    ],
    ids=repr,
)
def test_the_template_says_when_it_opens_the_reasoning(end: str, opens: list[str], tmp_path: Path) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, "a")))
    tokenizer.chat_template = f"{_BEGIN}{end}{{% endif %}}"
    assert chat_facts(tmp_path, tokenizer)["opens_reasoning"] == opens


@pytest.mark.parametrize("is_token", [True, False])
def test_the_mark_behind_the_reasoning_may_be_a_token(is_token: bool, tmp_path: Path) -> None:
    vocabulary = {"a": 0} | ({"</think>": 7} if is_token else {})
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(vocabulary, "a")))
    tokenizer.chat_template = f"{_BEGIN}{{% endif %}}"
    assert chat_facts(tmp_path, tokenizer)["reasoning_end_id"] == (7 if is_token else None)


@pytest.mark.parametrize(
    ("template", "added", "ids"),
    [
        ("<tool_call>", ["<tool_call>", "</tool_call>"], [1, 2]),
        ("<tool_call>", [], []),
        ("<tool_call>", ["<tool_call>"], None),
        ("", ["<tool_call>", "</tool_call>"], None),
    ],
)
def test_marks_of_calls_may_be_tokens(template: str, added: list[str], ids: list[int] | None, tmp_path: Path) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, "a")))
    tokenizer.add_tokens(added)
    tokenizer.chat_template = template
    assert chat_facts(tmp_path, tokenizer)["call_mark_ids"] == ids


def test_the_variables_are_those_that_the_template_reads_and_does_not_set(tmp_path: Path) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, "a")))
    said = "{% for message in messages %}{% generation %}{{ message.thinking }}{% endgeneration %}{% endfor %}"
    effort = "{% set enable_thinking = enable_thinking | default(true) %}{% if verbosity is defined %}a{% endif %}"
    tokenizer.chat_template = f"{effort}{said}{{{{ strftime_now('%Y') }}}}{{{{ namespace(found=1).found }}}}"
    assert chat_facts(tmp_path, tokenizer)["read_variables"] == ["enable_thinking", "messages", "verbosity"]
