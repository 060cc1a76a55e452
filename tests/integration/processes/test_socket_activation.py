"""deploy/systemd: the units fit the service, and systemd's own proxy ends when its callers have gone."""

import configparser
import shutil
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from demo.processes import ServiceProcess
from neuronpipe import __file__ as neuronpipe_package
from neuronpipe.api.v1.inference_pb2_grpc import InferenceServiceStub
from neuronpipe.cli.serve import settings_parser
from neuronpipe.client import Client
from neuronpipe.serve.settings import AllSettings
from tests.callers.requests import classify
from tests.servers.ports import free_port
from tests.suite.waiting import until

_UNITS = Path(__file__).parents[3] / "deploy" / "systemd"
_PROXY = Path("/lib/systemd/systemd-socket-proxyd")


@pytest.fixture
def activate() -> str:
    found = shutil.which("systemd-socket-activate")
    if not found or not _PROXY.exists():
        pytest.skip("needs systemd's socket-activate and socket-proxyd")
    return found


def _unit(name: str) -> dict[str, dict[str, str]]:
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(_UNITS / name)
    return {section: dict(parser[section]) for section in parser.sections()}


def test_the_units_call_the_service_with_settings_that_it_has() -> None:
    service, proxy = _unit("neuronpipe.service")["Service"], _unit("neuronpipe-proxy.service")
    words = service["ExecStart"].split()
    assert words[1:3] == ["serve", "all"]
    given = AllSettings.of(**vars(settings_parser("all").parse_args(words[3:]))).process
    path = given.listen.removeprefix("unix:")
    assert Path(path).is_relative_to(Path("/run") / service["RuntimeDirectory"])
    assert proxy["Service"]["ExecStart"].split()[-1] == path
    assert f"--target {given.listen};" in service["ExecStartPost"]
    assert proxy["Unit"]["Requires"] == proxy["Unit"]["After"] == "neuronpipe.service"
    assert proxy["Service"]["User"] == service["User"]  # of the socket's folder
    assert _unit("neuronpipe.socket")["Socket"]["Service"] == "neuronpipe-proxy.service"
    # platform/process/life.py: a second for late callers, ten to unload.
    assert float(service["TimeoutStopSec"]) > given.grace_s + 11
    assert 0 < given.max_connection_idle_s < 300


def test_a_request_that_comes_before_the_service_runs_is_answered_and_both_end_when_unused(
    activate: str, fake_repository: Path, tmp_path: Path
) -> None:
    path, address, log = tmp_path / "gateway.sock", f"127.0.0.1:{free_port()}", tmp_path / "log"
    neuronpipe = f"{sys.executable} -m neuronpipe"
    # What the units have systemd do with the first connection, which comes before the service has been idle for long.
    serve = f"{neuronpipe} serve all --repository {fake_repository} --listen unix:{path} --idle-exit-s 15"
    start = f"({serve}; echo ended with $? >> {log}) < /dev/null & until {neuronpipe} health --target unix:{path}; "
    start += f"do sleep 0.1; done; exec {_PROXY} --exit-idle-time=1s {path}"
    # It passes no variables on, and this neuronpipe need not be the one that is installed.
    variables = ["-E", f"PYTHONPATH={Path(neuronpipe_package).parents[1]}"]
    command = [activate, "-l", address, *variables, "/bin/sh", "-c", start]
    with (tmp_path / "errors").open("w+") as errors:
        activated = subprocess.Popen(command, stderr=errors)
        try:
            until(lambda: "Listening on" in (tmp_path / "errors").read_text())
            assert not path.exists()
            with grpc.insecure_channel(address) as channel:
                infer = InferenceServiceStub(channel).Infer
                # On a busy machine the service starts for longer than an attempt to connect takes.
                assert infer(classify("A fine day."), timeout=120, wait_for_ready=True).HasField("result")
            assert activated.wait(timeout=60) == 0
            until(lambda: log.exists() and log.read_text() == "ended with 0\n")
        finally:
            activated.kill()
            activated.wait()


def test_the_proxy_passes_calls_on_and_ends_when_its_callers_have_gone(
    activate: str, fake_repository: Path, tmp_path: Path
) -> None:
    path, address = tmp_path / "gateway.sock", f"127.0.0.1:{free_port()}"
    options = ("--repository", str(fake_repository), "--listen", f"unix:{path}")
    with ServiceProcess("all", *options) as process:
        process.wait_until_ready()
        # It becomes the proxy with the first connection.
        command = [activate, "-l", address, str(_PROXY), "--exit-idle-time=1s", str(path)]
        proxy = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            assert proxy.stderr
            assert "Listening on" in proxy.stderr.readline()
            with Client(address) as client:
                assert client.infer(classify("A fine day.")).HasField("result")
            assert proxy.wait(timeout=60) == 0
        finally:
            proxy.kill()
            proxy.communicate()
