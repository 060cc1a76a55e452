"""cli/job.py: `neuronpipe job dead` and a Redis that does not answer."""

import socket

import pytest

from neuronpipe import cli
from neuronpipe.bulk.jobs import store


@pytest.mark.parametrize("verb", [("list",), ("retry", "jobs/1")])
def test_a_redis_that_never_answers_is_told_with_its_address_after_one_time_limit(
    verb: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(store, "_TIMEOUT_S", 0.3)
    asked = []
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the system accepts for it
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("NEURONPIPE_JOB_JOBS_REDIS_URL", f"redis://user:secret@{address}/0")
        with pytest.raises(SystemExit) as ended:
            cli.main(["job", "dead", *verb])
        silent.settimeout(0)
        while True:
            try:
                asked.append(silent.accept()[0])
            except BlockingIOError:
                break
    for connection in asked:
        connection.close()
    assert ended.value.code == 1
    told = f"--jobs-redis-url {address}: the Redis of jobs does not answer (TimeoutError)"
    assert capsys.readouterr().err == f"neuronpipe: UNAVAILABLE: {told}\n"
    assert len(asked) == 1


def test_a_socket_of_redis_that_is_not_there_is_told_by_its_path(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["job", "dead", "list", "--jobs-redis-url", "unix:///nowhere/redis"])
    assert "--jobs-redis-url /nowhere/redis: the Redis of jobs does not answer" in capsys.readouterr().err
