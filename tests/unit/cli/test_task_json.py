"""cli/task_json.py: what may be written for an input, and what is said of anything else."""

import json
import re

import pytest

from neuronpipe.api.v1.tasks_pb2 import (
    Aggregation,
    ScoreFunction,
    TaskInput,
    TextClassificationInput,
    TokenClassificationInput,
    Truncation,
)
from neuronpipe.cli.task_json import read_task_input
from neuronpipe.core.errors import SetupError


@pytest.mark.parametrize("word", ["right", "RIGHT", "Right", "TRUNCATION_RIGHT", "truncation_right"])
@pytest.mark.parametrize("task", ["text_classification", "text-classification", "textClassification"])
def test_tasks_have_hyphens_or_underscores_and_enums_short_names_or_full_ones(task: str, word: str) -> None:
    expected = TextClassificationInput(text="A fine day.", top_k=2, truncation=Truncation.TRUNCATION_RIGHT)
    written = json.dumps({task: {"text": "A fine day.", "top_k": 2, "truncation": word}})
    assert read_task_input(written) == TaskInput(text_classification=expected)


def test_an_enum_of_two_words_is_cut_behind_both() -> None:
    written = '{"text_classification": {"text": "a", "function": "sigmoid"}}'
    assert read_task_input(written).text_classification.function == ScoreFunction.SCORE_FUNCTION_SIGMOID


def test_an_enum_may_be_a_number_as_everywhere_in_protobuf() -> None:
    written = '{"token_classification": {"text": "a", "aggregation": 2}}'
    expected = TokenClassificationInput(text="a", aggregation=Aggregation.AGGREGATION_SIMPLE)
    assert read_task_input(written) == TaskInput(token_classification=expected)


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ("7", """must be an object, such as {"text_classification": {"text": "A fine day."}}"""),
        (
            '{"rerank": "A fine day."}',
            """rerank: must be an object, such as {"query": "Where did the cat sleep?", "texts": """,
        ),
        (
            '{"rerank": {"texs": []}}',
            "rerank: there is no field 'texs'; did you mean 'texts'? (there are: query, texts, top_n, function, ",
        ),
        (
            '{"reranking": {}}',
            "there is no field 'reranking'; did you mean 'rerank'? (there are: text_classification, "
            "sentence_embedding, ",
        ),
        (
            '{"text_classification": {"truncation": "rigth"}}',
            "text_classification.truncation: unknown value 'rigth'; did you mean 'right'? (there are: error, "
            "right, left)",
        ),
        ('{"token_classification": {"aggregation": "all"}}', "(there are: none, simple, first, average, max)"),
        ('{"fill_mask": {}, "fill-mask": {}}', "the field 'fill_mask' is given twice"),
        ('{"fill_mask": {"top_k": 1, "top_k": 2}}', "a field is given twice"),
        ('{"fill_mask": {"text": ["a"]}}', "Failed to parse text field"),
        ('{"rerank": {}, "fill_mask": {}}', "should not have multiple"),
        ("{", "Expecting property name enclosed in double quotes: line 1 column 2"),
    ],
)
def test_what_is_wrong_is_named_with_what_is_right(written: str, problem: str) -> None:
    with pytest.raises(SetupError, match=re.escape(problem)):
        read_task_input(written)
