"""Services whose device hangs: they end when they are told to, and say in their health that they should be replaced.

Run as a program, this is such a service: the first argument says what hangs, the others are those of `neuronpipe`.
"""

import asyncio
import json
import os
import shutil
import signal
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
from grpc_health.v1 import health_pb2

from demo.processes import ServiceProcess
from neuronpipe.api.v1.inference_pb2_grpc import InferenceServiceStub
from neuronpipe.cli import main
from neuronpipe.core.errors import Unavailable
from neuronpipe.rpc.client import check_health, open_channel
from neuronpipe.stages.neuron_executor import devices
from neuronpipe.stages.neuron_executor.backends import fake
from neuronpipe.stages.neuron_executor.backends.base import BackendRequest
from tests.callers.requests import classify
from tests.integration.processes.test_lifecycle import INFERENCE_SERVICE, wait_for_health
from tests.suite.constants import constants

pytestmark = [pytest.mark.local_only]

_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
# Longer than a test waits, and than Kubernetes does.
_FOREVER_S = 600.0


class _Hanging(fake.FakeBackend):
    """Computes in threads, some of which never end, and waits for them when it is closed."""

    batches = 0

    def __init__(self, request: BackendRequest, hangs: str) -> None:
        if hangs == "loading":
            print(json.dumps({"event": "loads"}), file=sys.stderr)
            time.sleep(_FOREVER_S)
        super().__init__(request)
        self._hangs = hangs
        self._threads = ThreadPoolExecutor(self.cores)

    async def run(self, core: int, prepare: Any, finish: Any, *, is_alone: bool = False) -> Any:
        _Hanging.batches += 1
        if self._hangs == "every batch" or (self._hangs == "one batch" and _Hanging.batches == 1):
            await asyncio.get_running_loop().run_in_executor(self._threads, time.sleep, _FOREVER_S)
        return await super().run(core, prepare, finish, is_alone=is_alone)

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        super().close()


@contextmanager
def _serving(repository: Path, service: str, hangs: str, *options: str) -> Iterator[ServiceProcess]:
    command = ("tests.integration.processes.test_hanging_devices", hangs, "serve", service)
    given = ("--repository", str(repository), "--cores", "2", "--grace-s", "1", *options)
    with ServiceProcess(service, *given, command=command, environment=constants(batch_limit_s=1)) as process:
        yield process


@pytest.fixture
def repository(fake_repository: Path, tmp_path: Path) -> Path:
    """A repository of one model."""
    shutil.copytree(fake_repository / "classifier", tmp_path / "classifier")
    return tmp_path


@pytest.mark.parametrize("service", ["neuron-executor", "all"])
def test_sigterm_while_a_model_is_being_loaded_ends_the_process_at_once(repository: Path, service: str) -> None:
    with _serving(repository, service, "loading") as process:
        process.wait_for("loads")
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
        assert process.events()[-1]["event"] == "stopped"


def test_sigterm_ends_a_process_with_a_batch_that_hangs(repository: Path) -> None:
    with _serving(repository, "neuron-executor", "one batch") as process:
        process.wait_until_ready()
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
        assert process.events()[-1]["event"] == "stopped"


def test_a_start_on_which_every_batch_hangs_fails_and_ends(repository: Path) -> None:
    with _serving(repository, "neuron-executor", "every batch") as process:
        assert process.wait(timeout_s=60) == 2
        assert "cannot run a warm-up batch" in Path(process._log.name).read_text()


# The core is lost before the front processes start, which takes seconds on a busy machine.
@pytest.mark.parametrize(
    ("limit_s", "fronts"), [(4, ()), (15, ("--front-processes", "2"))], ids=["one process", "front processes"]
)
async def test_a_process_that_has_lost_a_core_for_longer_than_the_limit_is_not_serving_and_still_answers(
    repository: Path, limit_s: int, fronts: tuple[str, ...]
) -> None:
    with _serving(repository, "all", "one batch", "--impaired-limit-s", str(limit_s), *fronts) as process:
        process.wait_until_ready()
        assert check_health(process.target, "", 10) == ""
        await wait_for_health(process.target, _NOT_SERVING, "")
        assert process.wait_for("impaired; health is NOT_SERVING")["problem"] == "1 of 2 cores are lost"
        assert check_health(process.target, INFERENCE_SERVICE, 10) == INFERENCE_SERVICE
        async with open_channel(process.target) as channel:
            answer = await InferenceServiceStub(channel).Infer(classify("a"), timeout=10)
            assert answer.result.text_classification.labels
        if fronts:  # also one that comes later
            pid = process.wait_for("a front process is open")["pid"]
            assert isinstance(pid, int)
            os.kill(pid, signal.SIGKILL)
            process.wait_for("a front process is open", times=3)
            for _ in range(20):  # at either
                with pytest.raises(Unavailable, match="NOT_SERVING"):
                    check_health(process.target, "", 10)


def test_liveness_over_http_tells_of_it_as_well(repository: Path) -> None:
    with _serving(repository, "all", "one batch", "--impaired-limit-s", "4", "--http-listen", "127.0.0.1:0") as process:
        process.wait_until_ready()
        url = f"http://{process.wait_for('listening for HTTP')['address']}"
        assert _get(f"{url}/v2/health/live") == (200, {"live": True})
        process.wait_for("impaired; health is NOT_SERVING")
        assert _get(f"{url}/v2/health/live") == (503, {"live": False})


def _get(url: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, json.load(answer)
    except HTTPError as error:
        return error.code, json.load(error)


if __name__ == "__main__":
    kind = sys.argv.pop(1)
    vars(devices)["load_backend"] = lambda name, request: _Hanging(request, kind)
    main()
