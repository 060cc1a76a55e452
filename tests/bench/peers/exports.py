"""Graphs that other libraries export, made once in their environment."""

import subprocess
from pathlib import Path

from demo.model import find_minilm
from tests.bench.peers.embedders_alone import ONNX_CLASSIFIERS
from tests.bench.peers.environments import CACHE, ROOT
from tests.bench.peers.running import PeerUnavailable, peer_python
from tests.bench.systems import SOURCE, find_repository

ENVIRONMENT = "embedders"


def export_onnx() -> Path:
    """A folder with the graphs that other libraries export, and the classifier's in ONNX. Raises PeerUnavailable."""
    folder = CACHE / "embedders"
    if not (folder / "classifier" / ONNX_CLASSIFIERS["int8"]).is_file():
        find_repository("fake")  # makes SOURCE
        command = [peer_python(ENVIRONMENT), "-m", "tests.bench.peers.embedders_export"]
        sources = (str(find_minilm()), str(SOURCE), str(folder))
        made = subprocess.run([*command, *sources], check=False, capture_output=True, text=True, cwd=ROOT)
        if made.returncode:
            raise PeerUnavailable(ENVIRONMENT, f"its graphs cannot be exported: {made.stderr.strip()[-2000:]}")
    return folder
