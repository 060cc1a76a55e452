"""The task that CONTRIBUTING.md adds as an example: the page's commands apply worked_example.diff, generate code and
pages from it, and run the test of the task.
"""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.documentation.pages import ROOT, fences

_DIFF = Path(__file__).with_name("worked_example.diff")
_COPIED = (
    *("demo", "deploy", "docker", "docs", "examples", "protos", "services", "tests", ".ci"),
    *("CONTRIBUTING.md", "Makefile", "README.md", "mkdocs.yml", "pyproject.toml"),
)
_TESTS = (
    "tests/unit/tasks/test_base_options.py",
    "tests/unit/cli/test_request.py",
    "tests/unit/doors/oip/test_task_model.py",
    "tests/repository/test_sample_answers.py",
)
_IGNORED = shutil.ignore_patterns("__pycache__", "node_modules", "*.png")
# The commands use the environment of this test, which make would otherwise renew by the age of its files.
_MAKE = ("make", "--old-file=.venv/.dev", "--old-file=.venv/.demo")


def test_the_worked_example_fits_the_repository_line_by_line() -> None:
    _run(["git", "apply", "--check", str(_DIFF)], ROOT)


@pytest.mark.sampled
@pytest.mark.timeout(300)
def test_the_commands_of_the_page_add_the_task_and_its_tests_pass(tmp_path: Path) -> None:
    for name in _COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, ignore=_IGNORED)
        else:
            shutil.copy(source, tmp_path)
    (tmp_path / ".venv").symlink_to(ROOT / ".venv")
    [block] = [fence for fence in fences(ROOT / "CONTRIBUTING.md") if "git apply" in fence.content]
    commands = [shlex.split(line) for line in block.content.splitlines()]
    assert [command[0] for command in commands] == ["git", "make", ".venv/bin/python"]
    for command in commands:
        _run([*_MAKE, *command[1:]] if command[0] == "make" else command, tmp_path)
    _run([".venv/bin/python", "-m", "tests.reference", "--check"], tmp_path)
    _run([".venv/bin/python", "-m", "pytest", "-n0", "-q", "--share", "1", *_TESTS], tmp_path)


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
