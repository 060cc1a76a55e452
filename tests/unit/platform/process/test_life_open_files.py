"""platform/process/life.py: room for connections among the open files."""

import logging
import resource

import pytest

from neuronpipe.platform.process import life


@pytest.mark.parametrize(
    ("soft", "hard", "raised_to", "warns"),
    [
        (1024, 1 << 20, 4608, False),
        (1024, resource.RLIM_INFINITY, 4608, False),
        (1024, 2048, 2048, True),
        (1024, 1024, None, True),
        (1 << 16, 1 << 20, None, False),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None, False),
    ],
)
def test_the_limit_is_raised_as_far_as_it_may_and_no_further(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    soft: int,
    hard: int,
    raised_to: int | None,
    warns: bool,
) -> None:
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: raised.append(limits))
    with caplog.at_level(logging.WARNING, logger="neuronpipe"):
        life.make_room_for(4096)  # and 512 files of others
    assert raised == ([(raised_to, hard)] if raised_to else [])
    assert bool(caplog.records) == warns
