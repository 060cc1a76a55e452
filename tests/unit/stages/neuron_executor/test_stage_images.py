"""Images through the prediction stage: warm-up, batches and the fake back end, which gives each image outputs of its
own.
"""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from neuronpipe.bundles.buckets import Bucket
from neuronpipe.bundles.manifest import Artifact
from neuronpipe.bundles.repository import read_bundle
from neuronpipe.bundles.writing import new_bundle, write_manifest
from neuronpipe.core.calls import Call
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.items import ExecuteItem, ModelKey, Prediction
from neuronpipe.core.metrics import Telemetry
from neuronpipe.core.packed import TensorSets
from neuronpipe.core.tensors import Array
from neuronpipe.stages.neuron_executor.stage import running_executor
from neuronpipe.stages.settings import EngineSettings
from tests.unit.bundles.written import manifest
from tests.unit.model_specs import image_spec

_BUCKETS = (Bucket(batch=1, tokens=6), Bucket(batch=8, tokens=6))


def _item(pixels: Array) -> ExecuteItem:
    return ExecuteItem(Call(), ModelKey("m", 1), TensorSets(arrays=[{"pixels": pixels}]))


def _logits(prediction: Prediction) -> list[float]:
    (output,) = prediction.outputs.arrays
    logits: list[float] = output["logits"].tolist()
    return logits


@pytest.mark.parametrize("buckets", [(), _BUCKETS], ids=["any shape", "buckets"])
async def test_images_run_in_batches_each_with_its_own_outputs(buckets: tuple[Bucket, ...], tmp_path: Path) -> None:
    artifact = Artifact(backend="fake", dtype="float32", buckets=buckets, properties={"device_time_s": "0.01"})
    with new_bundle(tmp_path, "m", 1) as folder:
        write_manifest(folder, manifest(model=image_spec(name="m"), tokenizer_file="", artifacts=(artifact,)))
    images = np.random.default_rng(20261121).integers(0, 256, (12, 3, 32, 48), np.uint8)
    async with running_executor([read_bundle(tmp_path / "m/1")], EngineSettings(), Telemetry()) as stage:
        alone = [_logits(await stage.execute(_item(image))) for image in images]
        together = await asyncio.gather(*(stage.execute(_item(image)) for image in images))
        with pytest.raises(InvalidInput, match="expected uint8"):
            await stage.execute(_item(images[0, :, :31]))
    assert [_logits(one) for one in together] == alone
    assert len({tuple(logits) for logits in alone}) == 12
    assert max(one.batch_size for one in together) > 1
    assert {one.bucket_tokens for one in together} == {6}
