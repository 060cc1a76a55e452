"""bulk/transform/near_engine.py: batches follow from the rows alone, and a bad sequence fails alone."""

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from neuronpipe.bulk.transform.near_engine import BatchMaker, BatchWindow, TransformSettings, cut_batches
from neuronpipe.bundles.manifest import Artifact
from neuronpipe.bundles.repository import read_repository
from neuronpipe.core.calls import Call
from neuronpipe.core.errors import InternalError
from neuronpipe.core.items import ExecuteItem, ModelKey, Prediction
from neuronpipe.core.packed import TensorSets
from tests.unit.bundles.written import write_bundle
from tests.unit.model_specs import image_text_spec

_BAD = 7


class _Executor:
    """Computes each sequence's length, and refuses items with the token _BAD."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    async def __call__(self, item: ExecuteItem) -> Prediction:
        ids = [arrays["input_ids"] for arrays in item.sequences.arrays]
        self.batches.append([len(id) for id in ids])
        await asyncio.sleep(0)
        if any((id == _BAD).any() for id in ids):
            raise InternalError("the model could not compute this input")
        outputs = [{"length": np.array(len(id))} for id in ids]
        return Prediction(TensorSets(arrays=outputs), bucket_tokens=max(map(len, ids)))


def _item(lengths: Sequence[int], token: int = 1) -> ExecuteItem:
    arrays = [{"input_ids": np.full(length, token, np.int32)} for length in lengths]
    return ExecuteItem(Call(), ModelKey("m", 1), TensorSets(arrays=arrays))


async def _run(maker: BatchMaker, rows: Sequence[Sequence[int]], order: Sequence[int], **bad: int) -> list[Any]:
    """The lengths of each row's outputs, or its error; rows without sequences leave before. They come in this order."""

    async def compute(window: BatchWindow, row: int) -> Any:
        with maker.row(window, row):
            try:
                if not rows[row]:
                    return None
                found = await maker.execute(_item(rows[row], _BAD if row == bad.get("row") else 1))
                return [int(outputs["length"]) for outputs in found.outputs.arrays]
            except InternalError as error:
                return error

    async with maker.window(len(rows)) as window:
        tasks = {}
        for row in order:
            tasks[row] = asyncio.create_task(compute(window, row))
            await asyncio.sleep(0)
        return [await tasks[row] for row in range(len(rows))]


@pytest.fixture
def maker(fake_repository: Path) -> tuple[BatchMaker, _Executor]:
    executor = _Executor()
    bundle = next(bundle for bundle in read_repository(fake_repository) if bundle.spec.name == "classifier")
    settings = TransformSettings.of(max_batch_tokens=64, max_batch_size=8)
    return BatchMaker(executor, bundle, settings.executor), executor


async def test_batches_do_not_depend_on_the_order_in_which_rows_arrive(maker: tuple[BatchMaker, _Executor]) -> None:
    batches, executor = maker
    lengths = random.Random(5)
    rows = [[lengths.randint(1, 40) for _ in range(lengths.choice([0, 1, 1, 1, 3]))] for _ in range(60)]
    seen = []
    for seed in range(3):
        order = list(range(len(rows)))
        random.Random(seed).shuffle(order)
        executor.batches.clear()
        assert await _run(batches, rows, order) == [row or None for row in rows]
        seen.append(sorted(executor.batches))
    assert seen[0] == seen[1] == seen[2]
    for batch in seen[0]:
        assert len(batch) <= 8
        assert len(batch) == 1 or len(batch) * -(-max(batch) // 4) * 4 <= 64


async def test_a_row_that_the_model_cannot_compute_fails_alone(maker: tuple[BatchMaker, _Executor]) -> None:
    found = await _run(maker[0], [[4]] * 6, range(6), row=2)
    assert isinstance(found[2], InternalError)
    assert [outcome for outcome in found if outcome == [4]] == [[4]] * 5


async def test_a_window_whose_rows_all_failed_before_ends(maker: tuple[BatchMaker, _Executor]) -> None:
    assert await _run(maker[0], [[]] * 3, range(3)) == [None] * 3
    assert not maker[1].batches


def test_images_and_texts_of_one_model_are_cut_into_batches_of_their_own(tmp_path: Path) -> None:
    artifact = Artifact(backend="openvino", dtype="float32")
    write_bundle(tmp_path, "m", model=image_text_spec(name="m"), artifacts=(artifact,))
    (bundle,) = read_repository(tmp_path)
    # An image counts as 17 tokens, one more than a text may have.
    batches = list(cut_batches(bundle, TransformSettings.of().executor)([5, 17, 16, 17, 1, 17]))
    assert batches == [[1, 3, 5], [2, 0, 4]]
