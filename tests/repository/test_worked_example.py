"""The task that CONTRIBUTING.md adds as an example: worked_example.diff applies to this repository, and its tests pass.

The diff has no generated code: the test generates it, as `make fix-protos` does.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documentation.pages import ROOT, fences

_DIFF = Path(__file__).with_name("worked_example.diff")
_COPIED = ("demo", "docs", "protos", "services", "tests", "pyproject.toml")
_TESTS = (
    "tests/unit/tasks/test_sentence_distance.py",
    "tests/unit/tasks/test_base_options.py",
    "tests/unit/cli/test_request.py",
    "tests/unit/doors/oip/test_task_model.py",
)
_IGNORED = shutil.ignore_patterns("__pycache__", "node_modules", "*.png", "results.json")


@pytest.mark.sampled
@pytest.mark.timeout(300)
def test_the_worked_example_applies_and_its_tests_pass(tmp_path: Path) -> None:
    for name in _COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, ignore=_IGNORED)
        else:
            shutil.copy(source, tmp_path)
    _run(["git", "apply", "-C1", str(_DIFF)], tmp_path)
    generate = ["-m", "grpc_tools.protoc", "-Iprotos", f"--python_out={tmp_path / 'made'}"]
    (tmp_path / "made").mkdir()
    _run([sys.executable, *generate, "protos/neuronpipe/api/v1/tasks.proto"], tmp_path)
    shutil.copytree(tmp_path / "made/neuronpipe/api/v1", tmp_path / "services/neuronpipe/api/v1", dirs_exist_ok=True)
    _run([sys.executable, "-m", "pytest", "-n0", "-q", "--share", "1", *_TESTS], tmp_path)


def _run(command: list[str], folder: Path) -> None:
    # Git would apply nothing in a folder of a repository that ignores it.
    variables = {"PATH": "/usr/bin:/bin", "GIT_CEILING_DIRECTORIES": "/"}
    variables["PYTHONPATH"] = f"{folder / 'services'}:{folder}"
    process = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:]


def test_contributing_shows_lines_of_the_worked_example_in_their_order() -> None:
    [shown] = [fence for fence in fences(ROOT / "CONTRIBUTING.md") if fence.language == "diff"]
    lines = iter(_DIFF.read_text(encoding="utf-8").splitlines())
    files = re.findall(r"^\+\+\+ b/(.+)$", _DIFF.read_text(encoding="utf-8"), re.MULTILINE)
    missing = [
        line
        for line in shown.content.splitlines()
        if line.strip() and line != "…" and line not in files and line not in lines
    ]
    assert missing == []
