"""worker.py: a worker answers until its pipe is closed, and its end is told."""

import os
import signal
from multiprocessing.connection import Connection
from typing import Any

import pytest

from neuronpipe.platform.process.worker import ProcessEnded, Worker


def _double(pipe: "Connection[Any, Any]") -> None:
    pipe.send(os.getpid())
    while True:
        number = pipe.recv()
        if number is None:
            os.kill(os.getpid(), signal.SIGKILL)
        pipe.send(2 * number)


def test_a_worker_answers_until_its_pipe_is_closed_and_leaves_ctrl_c_to_its_parent() -> None:
    with Worker.started(_double, name="double") as worker:
        pid = worker.receive()
        os.kill(pid, signal.SIGINT)
        worker.send(3)
        assert worker.receive() == 6
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_worker_that_is_killed_is_named_with_its_signal() -> None:
    with Worker.started(_double, name="double") as worker:
        worker.receive()
        worker.send(None)
        with pytest.raises(ProcessEnded, match="the process ended with signal SIGKILL; there may be too little memory"):
            worker.receive()
