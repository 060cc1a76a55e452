"""Virtual environments of the peers, made when first asked for."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
CACHE = ROOT / ".cache/bench"
# Named alone, this version comes as its CPU build; everything else is then installed beside it.
_TORCH = "torch==2.13.0"
# Installed as they are listed, for they do without some of what their packages ask for.
_WITHOUT_DEPENDENCIES = ("vllm",)
# llama.cpp's build for this CPU: what the server does without is left out, and it compiles a file on each CPU.
_BUILD = {
    "CMAKE_ARGS": "-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF",
    "LLAMA_CPP_BUILD_JOBS": str(len(os.sched_getaffinity(0))),
}
# llama.cpp is compiled: half an hour of CPU time.
_INSTALL_LIMIT_S = 3600


def environment_python(name: str) -> Path:
    """The interpreter of an environment that has NAME-requirements.txt. Raises RuntimeError with pip's words where it
    cannot be made.
    """
    requirements = Path(__file__).with_name(f"{name}-requirements.txt")
    folder = CACHE / f"venv-{name}"
    marker, python = folder / ".installed.txt", folder / "bin/python"
    if marker.is_file() and marker.read_text() == requirements.read_text():
        return python
    _run(sys.executable, "-m", "venv", "--clear", str(folder))
    pip = (str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    if _TORCH in requirements.read_text().splitlines():
        _run(*pip, _TORCH)
    how = ("--no-deps",) if name in _WITHOUT_DEPENDENCIES else ()
    _run(*pip, *how, "--requirement", str(requirements))
    marker.write_text(requirements.read_text())
    return python


def _run(*command: str) -> None:
    environment = {**os.environ, **_BUILD}
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_INSTALL_LIMIT_S, env=environment)
    except subprocess.CalledProcessError as error:
        raise RuntimeError(error.stderr.strip()[-2000:]) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(str(error)) from error
