"""Exports the models of the benchmark as the libraries beside us do: `source` (MiniLM as an embedder) and `classifier`,
each with ONNX graphs in float32 and int8, and `source` with OpenVINO's.

Run: python -m tests.bench.peers.embedders_export EMBEDDER CLASSIFIER FOLDER
"""

import shutil
import sys
from pathlib import Path
from typing import Any

from onnxruntime.quantization import QuantType, quantize_dynamic
from optimum.onnxruntime import ORTModelForSequenceClassification
from sentence_transformers import SentenceTransformer, export_dynamic_quantized_onnx_model

from tests.bench.peers.embedders_alone import HUB_COMMIT, HUB_MODEL, ONNX_CLASSIFIERS, hub_folder

# The instructions that its int8 graph is made for.
_INSTRUCTIONS = "avx512_vnni"


def export(embedder: Path, classifier: Path, folder: Path) -> None:
    """Makes all of them."""
    source = folder / "source"
    model: Any = SentenceTransformer(str(embedder), backend="onnx", device="cpu")
    model.save_pretrained(str(source))
    export_dynamic_quantized_onnx_model(model, _INSTRUCTIONS, str(source))
    SentenceTransformer(str(embedder), backend="openvino", device="cpu").save_pretrained(str(source))
    shutil.copy(embedder / "model.safetensors", source)
    _fill_hub(source, hub_folder(folder) / f"models--{HUB_MODEL.replace('/', '--')}")
    target = folder / "classifier"
    ORTModelForSequenceClassification.from_pretrained(str(classifier), export=True).save_pretrained(str(target))
    quantize_dynamic(
        target / ONNX_CLASSIFIERS["float32"], target / ONNX_CLASSIFIERS["int8"], weight_type=QuantType.QInt8
    )


def _fill_hub(source: Path, cached: Path) -> None:
    """A cache of the Hub as its client leaves one, for candle's reader."""
    (cached / "refs").mkdir(parents=True, exist_ok=True)
    (cached / "refs/main").write_text(HUB_COMMIT)
    snapshot = cached / "snapshots" / HUB_COMMIT
    for file in source.rglob("*"):
        if file.is_file() and file.suffix in (".json", ".txt", ".safetensors"):
            target = snapshot / file.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)


if __name__ == "__main__":
    export(*map(Path, sys.argv[1:4]))
