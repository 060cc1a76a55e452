"""Virtual environments of the peers, made when first asked for."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
CACHE = ROOT / ".cache/bench"
# Named alone, this version comes as its CPU build; everything else is then installed beside it.
_TORCH = "torch==2.13.0"
# Installed as they are listed, for they do without some of what their packages ask for.
_WITHOUT_DEPENDENCIES = ("vllm",)
_INSTALL_LIMIT_S = 900


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
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_INSTALL_LIMIT_S)
    except subprocess.CalledProcessError as error:
        raise RuntimeError(error.stderr.strip()[-2000:]) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(str(error)) from error
