"""Folders that are made once a run, whichever of pytest-xdist's workers asks first."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock


def shared_folder(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """The folder of that name, which `make` has filled; workers that ask meanwhile wait.

    Other processes read it, too: no test may change it. It belongs to one run and is deleted as all temporary folders
    of pytest are, so it is never out of date.
    """
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # each worker's own folder is in the run's
    folder, complete = base / "shared" / name, base / "shared" / f"{name}.complete"
    folder.parent.mkdir(exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not complete.exists():
            shutil.rmtree(folder, ignore_errors=True)  # what another worker began and failed to make
            folder.mkdir()
            make(folder)
            complete.touch()
    return folder
