"""postprocessor/stage.py: outputs to results, each item by itself."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from neuronpipe.api.v1.stages_pb2 import ItemContext, PostprocessItem
from neuronpipe.api.v1.tasks_pb2 import TaskInput, TaskResult, TextClassificationInput
from neuronpipe.api.v1.tensors_pb2 import DataType, Tensor, TensorSet
from neuronpipe.bundles.repository import read_repository
from neuronpipe.core.errors import DeadlineExceeded, InvalidInput, ModelNotFound
from neuronpipe.core.tensors import to_tensor_set
from neuronpipe.postprocessor.stage import PostprocessorStage
from tests.unit.bundles.written import write_bundle


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[PostprocessorStage]:
    write_bundle(tmp_path)
    stage = PostprocessorStage(read_repository(tmp_path))
    yield stage
    stage.close()


def _item(**changes: Any) -> PostprocessItem:
    described: dict[str, Any] = {
        "model": "m",
        "version": "1",
        "input": TaskInput(text_classification=TextClassificationInput(text="x")),
        "outputs": [to_tensor_set({"logits": np.array([0, 5, 1], np.float32)})],
    }
    return PostprocessItem(**described | changes)


@pytest.mark.parametrize("text", ["x", "x" * 100_000], ids=["on the event loop", "in the thread"])
async def test_outputs_become_the_tasks_result(stage: PostprocessorStage, text: str) -> None:
    item = _item(input=TaskInput(text_classification=TextClassificationInput(text=text)))
    result = await stage.postprocess(item)
    assert [label.label for label in result.text_classification.labels] == ["b"]


@pytest.mark.parametrize(
    ("bad", "kind"),
    [
        (_item(model="none"), ModelNotFound),
        (_item(context=ItemContext(remaining_ns=1)), DeadlineExceeded),
        (_item(outputs=[TensorSet(tensors=[Tensor(data_type=DataType.DATA_TYPE_INT32, shape=[1])])]), InvalidInput),
        (_item(outputs=[]), IndexError),
    ],
    ids=["no such model", "expired", "no tensor", "a fault"],
)
async def test_a_bad_item_fails_alone(stage: PostprocessorStage, bad: PostprocessItem, kind: type[Exception]) -> None:
    good, failed, better = await asyncio.gather(*(stage.postprocess(item) for item in (_item(), bad, _item())), return_exceptions=True)
    assert (type(good), type(better)) == (TaskResult, TaskResult)
    assert isinstance(failed, kind)
