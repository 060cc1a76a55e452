"""A classifier with versions."""

from pathlib import Path

import pytest

from tests.models.versions import copy_classifier
from tests.systems.versions import make_stable


@pytest.fixture
def versions(fake_repository: Path, tmp_path: Path) -> Path:
    """Versions 1 and 2 of a classifier, which say in their labels which they are; 1 is stable."""
    copy_classifier(fake_repository, tmp_path, (1, 2), are_told_apart=True)
    make_stable(tmp_path, 1)
    return tmp_path
