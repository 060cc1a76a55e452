"""Writes the locks of docker/requirements: what each image installs, in the versions of constraints.txt, with hashes.

Run: python docker/lock.py          writes them all
     python docker/lock.py --check  says which are not what pyproject.toml and constraints.txt make of them
"""

import difflib
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_FOLDER = _ROOT / "docker" / "requirements"
# Older than the C library of each base image; llguidance has no wheel for older ones.
_PLATFORM = "x86_64-manylinux_2_31"


@dataclass(frozen=True)
class _Lock:
    """What goes into a lock: extras of pyproject.toml, and where there is a file NAME.in what that lists."""

    extras: tuple[str, ...] = ()
    constraints: str = "constraints.txt"
    # Packages left out: they come from somewhere else. Without torch, what CUDA needs is left out, too.
    without: tuple[str, ...] = ()


_LOCKS = {
    "build": _Lock(),
    "sbom": _Lock(),
    "server": _Lock(("server", "s3")),  # a layer that all images share
    "gateway": _Lock(("gateway", "s3")),
    "tokenizer": _Lock(("tokenizer", "s3")),
    "neuron-executor": _Lock(("executor-openvino", "s3")),
    "postprocessor": _Lock(("postprocessor", "s3")),
    "worker": _Lock(("worker",)),
    "sagemaker": _Lock(("all", "s3")),
    "compile": _Lock(("compile",), without=("torch",)),  # torch-cpu.txt has the build without CUDA
    "gpu": _Lock(("executor-torch", "s3")),
    "neuron": _Lock(
        ("executor-neuronx", "s3"), "constraints-transformers4.txt", without=("torch", "numpy")
    ),  # AWS's image has them
}


def _compile(name: str, output: Path) -> None:
    """Brings one lock up to date; what it holds already stays where it still fits."""
    lock = _LOCKS[name]
    listed = _FOLDER / f"{name}.in"
    command = [
        *(
            sys.executable,
            "-m",
            "uv",
            "pip",
            "compile",
            "--quiet",
            "--no-annotate",
            "--custom-compile-command",
            "make fix-locks",
        ),
        *("--generate-hashes", "--only-binary", ":all:", "--python-version", "3.11", "--python-platform", _PLATFORM),
        *(("--config-file", str(_FOLDER / "torch-cpu.toml")) if "torch" in lock.without else ("--no-config",)),
        *("--constraint", lock.constraints, *(f"--no-emit-package={package}" for package in lock.without)),
        *("--output-file", str(output), *(f"--extra={extra}" for extra in lock.extras)),
        *(["pyproject.toml"] if lock.extras else []),
        *([str(listed)] if listed.exists() else []),
    ]
    if subprocess.run(command, cwd=_ROOT, check=False).returncode:
        sys.exit(f"{name}: cannot be locked")


def _difference(name: str) -> list[str]:
    """How a lock would change."""
    committed = _FOLDER / f"{name}.txt"
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder) / committed.name
        fresh.write_text(committed.read_text())
        _compile(name, fresh)
        before, after = committed.read_text().splitlines(), fresh.read_text().splitlines()
        return list(difflib.unified_diff(before, after, str(committed), "fresh", n=0, lineterm=""))


def main() -> None:
    """Writes or checks every lock."""
    if "--check" not in sys.argv:
        for name in _LOCKS:
            _compile(name, _FOLDER / f"{name}.txt")
        return
    changed = [line for name in _LOCKS for line in _difference(name)]
    if changed:
        print("\n".join(changed))
        sys.exit("docker/requirements is not what pyproject.toml and constraints.txt make; run: make fix-locks")


if __name__ == "__main__":
    main()
