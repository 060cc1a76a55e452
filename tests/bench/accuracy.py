"""Accuracy of the benchmark's models in each dtype, as the compiler measures it, beside the dtypes' speed.

Run: python -m tests.bench.accuracy [--models MiniLM,…] [--dtypes int8,…]

It adds to docs/benchmarks/accuracy.json, of which `make fix-docs` makes a table. The classifier is that of the
benchmark.
"""

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from demo.model import find_minilm
from neuronpipe.measure.machine import describe_machine
from tests.bench.model import make_source
from tests.documentation.pages import ROOT
from tests.models.compiling import compile_model

_RESULTS = ROOT / "docs" / "benchmarks" / "accuracy.json"
_DTYPES = ("float32", "bfloat16", "int8", "int8-weights")
# The name of a model → its task, the meaning of its agreement, and its files.
_MODELS: Mapping[str, tuple[str, str, Callable[[Path], Path]]] = {
    "classifier": ("text_classification", "share of texts with the same best label", make_source),
    "MiniLM": ("sentence_embedding", "smallest cosine similarity of a text's vectors", lambda folder: find_minilm()),
}


def _measure(name: str, dtype: str) -> dict[str, object]:
    task, meaning, make = _MODELS[name]
    with tempfile.TemporaryDirectory() as temporary:
        source = make(Path(temporary) / "source")
        bundle = compile_model(source, Path(temporary) / "repository", task, dtype=dtype)
    accuracy = bundle.artifact("openvino").accuracy
    assert accuracy
    return {
        "model": name,
        "dtype": dtype,
        "agreement": accuracy.agreement,
        "meaning": meaning,
        "largest_difference": accuracy.largest_difference,
        "samples": accuracy.samples,
        "computed_dtype": accuracy.computed_dtype,
    }


def main() -> None:
    """Measures, and writes the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default=",".join(_MODELS))
    parser.add_argument("--dtypes", default=",".join(_DTYPES))
    given = parser.parse_args()
    for name in given.models.split(","):
        for dtype in given.dtypes.split(","):
            kept = json.loads(_RESULTS.read_text())["rows"] if _RESULTS.is_file() else []
            rows = [row for row in kept if (row["model"], row["dtype"]) != (name, dtype)]
            rows.append(_measure(name, dtype))
            rows.sort(key=lambda row: (list(_MODELS).index(row["model"]), _DTYPES.index(row["dtype"])))
            _RESULTS.write_text(json.dumps({"machine": describe_machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
