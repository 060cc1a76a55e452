"""core/items.py: the sizes of items."""

from typing import Any

import pytest

from neuronpipe.api.v1.tasks_pb2 import GenerationOptions, TaskInput, TextClassificationInput, TextGenerationInput
from neuronpipe.core.items import work_bytes
from neuronpipe.core.packed import Packed


def _prompt(prompt: str, **options: Any) -> TaskInput:
    given = GenerationOptions(**options)
    return TaskInput(text_generation=TextGenerationInput(prompt=prompt, options=given))


@pytest.mark.parametrize("options", [{"json_schema": "s" * 30_000}, {"choices": ["c" * 100] * 300}])
def test_a_schema_is_no_work_for_the_threads_that_encode_and_decode(options: dict[str, Any]) -> None:
    assert work_bytes(Packed(TaskInput, message=_prompt("a prompt", **options))) < 100


def test_texts_count_whole_beside_a_schema() -> None:
    assert 5000 < work_bytes(Packed(TaskInput, message=_prompt("p" * 5000, json_schema="s" * 30_000))) < 5100
    text = TaskInput(text_classification=TextClassificationInput(text="t" * 5000))
    assert work_bytes(Packed(TaskInput, message=text)) == text.ByteSize()


@pytest.mark.parametrize("size_bytes", [100, 70_000])
def test_small_and_large_inputs_count_whole_and_are_not_parsed(size_bytes: int) -> None:
    input = Packed(TaskInput, data=b"\xff" * size_bytes)
    assert work_bytes(input) == size_bytes
