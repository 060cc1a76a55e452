"""Libraries that embed texts in the process of their caller: sentence-transformers with PyTorch, ONNX and OpenVINO,
fastembed, and candle (candding).

Run in their environment: python -m tests.bench.peers.embedders_alone FOLDER LIBRARY DTYPE. It reads orders from its
standard input: the vectors of some texts, or texts for some seconds, in batches or one by one.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from tests.bench.peers.launching import say

MAX_TOKENS = 128
# The name of a graph in the folder of a server with onnxruntime.
ONNX_FILE = "model.onnx"
# Graphs of the classifier that is exported beside the embedder, by dtype.
ONNX_CLASSIFIERS = {"float32": "model.onnx", "int8": "model_int8.onnx"}
HUB_MODEL, HUB_COMMIT = "sentence-transformers/all-MiniLM-L6-v2", "0" * 40
ONNX_FILES = {"float32": "onnx/model.onnx", "int8": "onnx/model_qint8_avx512_vnni.onnx"}
# Of OpenVINO and candle.
_PRECISIONS = {"float32": "f32", "bfloat16": "bf16"}

# Vectors of texts. One call is one batch, which the library sorts and pads as it does.
Embed: TypeAlias = Callable[[Sequence[str]], Any]


def hub_folder(folder: Path) -> Path:
    """The folder that stands for the Hub's cache."""
    return folder / "hub"


def _sentence_transformers(folder: Path, dtype: str, backend: str, options: Mapping[str, Any]) -> Embed:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder / "source"), backend=backend, device="cpu", model_kwargs=dict(options))
    model.max_seq_length = MAX_TOKENS
    return lambda texts: model.encode(
        list(texts), batch_size=len(texts), normalize_embeddings=True, show_progress_bar=False
    )


def _of_torch(folder: Path, dtype: str) -> Embed:
    return _sentence_transformers(folder, dtype, "torch", {"torch_dtype": dtype})


def _of_onnx(folder: Path, dtype: str) -> Embed:
    options = {"file_name": ONNX_FILES[dtype], "provider": "CPUExecutionProvider"}
    return _sentence_transformers(folder, dtype, "onnx", options)


def _of_openvino(folder: Path, dtype: str) -> Embed:
    hints = {"INFERENCE_PRECISION_HINT": _PRECISIONS[dtype], "PERFORMANCE_HINT": "LATENCY"}
    return _sentence_transformers(folder, dtype, "openvino", {"ov_config": hints})


def _of_fastembed(folder: Path, dtype: str) -> Embed:
    from fastembed import TextEmbedding
    from fastembed.common.model_description import ModelSource, PoolingType

    TextEmbedding.add_custom_model(
        model="minilm",
        pooling=PoolingType.MEAN,
        normalization=True,
        sources=ModelSource(hf="local/minilm"),
        dim=384,
        model_file=ONNX_FILES[dtype],
    )
    model = TextEmbedding("minilm", specific_model_path=str(folder / "source"), threads=len(os.sched_getaffinity(0)))
    return lambda texts: list(model.embed(list(texts), batch_size=len(texts)))


def _of_candle(folder: Path, dtype: str) -> Embed:
    os.environ["HF_HUB_CACHE"] = str(hub_folder(folder))
    os.environ["HF_HOME"] = str(hub_folder(folder))
    import candding

    model: Any = candding.TextEmbedding(
        HUB_MODEL, device="cpu", dtype=_PRECISIONS[dtype], max_length=MAX_TOKENS, batch_size=32
    )
    return lambda texts: model.embed(list(texts), batch_size=len(texts))


# Library → its dtypes, and how it is made.
LIBRARIES: Mapping[str, tuple[Sequence[str], Callable[[Path, str], Embed]]] = {
    "sentence-transformers (PyTorch)": (("float32", "bfloat16"), _of_torch),
    "sentence-transformers (ONNX)": (("float32", "int8"), _of_onnx),
    "sentence-transformers (OpenVINO)": (("float32", "bfloat16"), _of_openvino),
    "fastembed": (("float32", "int8"), _of_fastembed),
    # On CPUs it has no product of matrices in bfloat16.
    "candle": (("float32",), _of_candle),
}


def main() -> None:
    """Answers orders until standard input ends."""
    folder, library, dtype = Path(sys.argv[1]), *sys.argv[2:4]
    embed = LIBRARIES[library][1](folder, dtype)
    texts: list[str] = json.loads((folder / "texts.json").read_text())
    say(event="ready")
    for line in sys.stdin:
        order = json.loads(line)
        if "count" in order:
            vectors = [[float(value) for value in vector] for vector in embed(texts[: order["count"]])]
            say(event="embedded", vectors=vectors)
        else:
            rate_per_s, p50_ms = measure(embed, texts, **order)
            say(event="measured", rate_per_s=rate_per_s, p50_ms=p50_ms)


def measure(embed: Embed, texts: Sequence[str], batch: int, seconds: float) -> tuple[float, float]:
    """Texts a second in batches of as many, round and round; and the median time of a batch in ms."""
    times_ms, began_s = list[float](), time.perf_counter()
    while not times_ms or time.perf_counter() - began_s < seconds:
        first = len(times_ms) * batch % len(texts)
        batch_began_s = time.perf_counter()
        embed(texts[first : first + batch])
        times_ms.append(1000 * (time.perf_counter() - batch_began_s))
    return len(times_ms) * batch / (time.perf_counter() - began_s), statistics.median(times_ms)


if __name__ == "__main__":
    main()
