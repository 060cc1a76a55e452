"""Folders that are made once a run, whichever of pytest-xdist's workers asks first."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

# A folder for several runs with the same code and packages, such as the runs of `make test`.
_VARIABLE = "NEURONPIPE_SHARED_FOLDERS"


def shared_folder(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Returns the folder of a name, which `make` has filled. Workers that ask meanwhile wait.

    Other processes also read the folder: no test may change it. The folder belongs to one run, so it is never out of
    date. pytest deletes it with its temporary folders, or the caller who set NEURONPIPE_SHARED_FOLDERS deletes it.
    """
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # each worker's own folder is in the run's
    shared = Path(os.environ.get(_VARIABLE, base / "shared"))
    folder, complete = shared / name, shared / f"{name}.complete"
    shared.mkdir(exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not complete.exists():
            shutil.rmtree(folder, ignore_errors=True)  # a folder that another worker began and failed to make
            folder.mkdir()
            make(folder)
            complete.touch()
    return folder
