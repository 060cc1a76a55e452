"""The stack of containers under test, by the commands that a person would use."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.servers.ports import free_port

T = TypeVar("T")

ROOT = Path(__file__).parents[2]
PROJECT = "neuronpipe-e2e"
SERVICES = ("gateway", "tokenizer", "neuron-executor", "postprocessor")
_FILES = ("docker/compose.yaml", "docker/compose.observability.yaml")
_TLS_FILES = ("docker/compose.tls.yaml", "docker/compose.tls-observability.yaml")
_JOB_FILES = ("docker/compose.jobs.yaml", "docker/compose.observability-jobs.yaml")
_TLS_JOB_FILES = ("docker/compose.tls-jobs.yaml", "docker/compose.tls-observability-jobs.yaml")
_LAST_FILES = ("tests/e2e/compose.e2e.yaml",)
# Grafana cannot be made from Debian's packages.
_STARTED = (*SERVICES, "redis", "jaeger", "prometheus")
_WAIT_LIMIT_S = 120
_POLL_S = 0.2


def wait_until(what: str, found: Callable[[], T | None], limit_s: float = _WAIT_LIMIT_S) -> T:
    """Asks until there is something true, and returns it. Raises TimeoutError."""
    give_up_s = time.monotonic() + limit_s
    while time.monotonic() < give_up_s:
        if answer := found():
            return answer
        time.sleep(_POLL_S)
    raise TimeoutError(f"waited {limit_s:g} s: {what}")


def _run(command: Sequence[str], environment: dict[str, str]) -> str:
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"{shlex.join(command)} ended with {result.returncode}:\n{result.stdout}{result.stderr}")
    return result.stdout


@dataclass(frozen=True)
class Container:
    """A container as the engine describes it."""

    id: str
    state: dict[str, Any]
    restarts: int
    address: str
    health_check: Sequence[str]


class Stack:
    """A project of its own on free ports. `make e2e` says by the environment which commands and which images."""

    def __init__(self) -> None:
        self.environment = {
            **os.environ,
            "COMPOSE_PROJECT_NAME": PROJECT,
            **{
                f"{name}_PORT": str(free_port())
                for name in ("GATEWAY", "GATEWAY_HTTP", "JAEGER", "PROMETHEUS", "GRAFANA")
            },
            # Only what a test samples.
            "TRACES_SAMPLER": "parentbased_always_off",
        }
        self._files: tuple[str, ...] = (*_FILES, *_LAST_FILES)
        self._docker = os.environ["DOCKER"]
        self._compose = os.environ["COMPOSE"].split()
        # Containers by their id and when they began.
        self._found_healthy: set[tuple[str, str]] = set()

    @property
    def target(self) -> str:
        """The gateway's address."""
        return f"127.0.0.1:{self.environment['GATEWAY_PORT']}"

    def url(self, service: str) -> str:
        """The address of a page."""
        return f"http://127.0.0.1:{self.environment[f'{service.upper()}_PORT']}"

    def docker(self, *words: str) -> str:
        """What a command of docker prints. Raises RuntimeError."""
        return _run([self._docker, *words], self.environment)

    def compose(self, *words: str, **variables: str) -> str:
        """What a command of docker compose prints. Raises RuntimeError."""
        files = [word for file in self._files for word in ("-f", file)]
        return _run([*self._compose, *files, *words], {**self.environment, **variables})

    def make(self, *words: str) -> str:
        """What a target of the Makefile prints. Raises RuntimeError."""
        return _run(["make", *words, f"COMPOSE_FILES={' '.join(self._files)}"], self.environment)

    def down(self) -> None:
        """Ends it and deletes what it has made, with any layer."""
        self._files = (*_FILES, *_TLS_FILES, *_JOB_FILES, *_TLS_JOB_FILES, *_LAST_FILES)
        self.make("down")

    def image(self, service: str) -> str:
        """The image of a service."""
        return f"{self.environment['IMAGE_PREFIX']}/{service}:{self.environment['VERSION']}"

    def compile(self, sources: dict[str, Path], tasks: dict[str, str]) -> None:
        """Puts models into the volume of sources and has the compile step make their bundles."""
        self.compose("up", "--no-start", "compile")
        [container] = self.compose("ps", "-aq" if "docker" in self._compose else "-q", "compile").split()
        for name, source in sources.items():
            with tempfile.TemporaryDirectory() as folder:
                copy = shutil.copytree(
                    source, Path(folder) / name, copy_function=shutil.copyfile
                )  # readable for the step's own user
                self.docker("cp", str(copy), f"{container}:/sources/{name}")
        *first, last = sources
        # In one process, as its start takes longer than a model; the last is made as people would.
        lines = [
            f"compile /sources/{name} --task {tasks[name].replace('_', '-')} --name {name} --repository /repository"
            for name in first
        ]
        program = f"from neuronpipe.cli import main\nfor line in {lines}:\n    main([*line.split(), '--dtype=float32'])"
        self.compose("run", "--rm", "--no-deps", "-T", "--entrypoint", "python3", "compile", "-c", program)
        self.environment |= {
            "MODEL_NAME": last,
            "MODEL_SOURCE": f"/sources/{last}",
            "MODEL_TASK": tasks[last].replace("_", "-"),
        }
        self.compose("up", "--no-deps", "--exit-code-from", "compile", "compile")

    def up(self, *options: str) -> None:
        """Starts what is not running, and waits until all of it is healthy."""
        self.compose("up", "-d", *options, *_STARTED)
        self.wait_until_healthy()

    @contextmanager
    def with_tls(self) -> Iterator[None]:
        """The same stack with the layer tls for the time of a block; the certificates that were made stay until its
        end.
        """
        before = self._files
        self._files = (*_FILES, *_TLS_FILES, *_LAST_FILES)
        try:
            self.up()
            yield
        finally:
            self.compose("rm", "--stop", "--force", "certificates")
            self._files = before
            self.up()

    @contextmanager
    def with_jobs(self) -> Iterator[None]:
        """The same stack with the layer jobs for the time of a block, in which it may have the layer tls already."""
        before = self._files
        with_tls = before[: -len(_LAST_FILES)] != _FILES
        self._files = (*before[: -len(_LAST_FILES)], *_JOB_FILES, *(_TLS_JOB_FILES if with_tls else ()), *_LAST_FILES)
        try:
            self.up("worker", "jobs-redis")
            yield
        finally:
            self.compose("rm", "--stop", "--force", "worker", "jobs-redis")
            self._files = before
            self.up()

    def wait_until_healthy(self) -> None:
        """Returns when every container of the services and of Redis is."""
        for service in (*SERVICES, "redis"):
            wait_until(f"{service} healthy", lambda service=service: self._are_healthy(service))  # type: ignore[misc]

    def _are_healthy(self, service: str) -> bool:
        found = self.containers(service)
        return bool(found) and all(self._is_healthy(service, container) for container in found)

    def _is_healthy(self, service: str, container: Container) -> bool:
        """Whether its health check passes now: the engine itself asks every five seconds only. A stage stays healthy
        until it ends; a gateway is so while it reaches all stages.
        """
        started = container.id, container.state["StartedAt"]
        if started not in self._found_healthy:
            try:
                self.docker("exec", container.id, *container.health_check)
            except RuntimeError:
                return False
            if service != "gateway":
                self._found_healthy.add(started)
        return True

    def containers(self, service: str, *, all: bool = False) -> list[Container]:
        """The running containers of a service, or all."""
        labels = {"project": PROJECT, "service": service}
        filters = [f"--filter=label=com.docker.compose.{key}={value}" for key, value in labels.items()]
        ids = self.docker("ps", "-q", "--no-trunc", *filters, *(["-a"] if all else [])).split()
        return [self.inspect(id) for id in sorted(ids)]

    def inspect(self, id: str) -> Container:
        """A container."""
        [found] = json.loads(self.docker("inspect", id))
        network = found["NetworkSettings"]["Networks"].get(f"{PROJECT}_internal", {})
        _, *check = found["Config"].get("Healthcheck", {}).get("Test") or ["NONE"]
        return Container(id, found["State"], found["RestartCount"], network.get("IPAddress", ""), check)

    def kill(self, container: Container) -> None:
        """Kills a container's process as a crash would: what `docker kill` ends does not come back."""
        self.signal(signal.SIGKILL, container)

    def signal(self, number: signal.Signals, *containers: Container) -> None:
        """Sends a signal to the first process of each container, without the engine's knowledge."""
        pids = [container.state["Pid"] for container in containers]
        program = f"import os; [os.kill(pid, {number.value}) for pid in {pids}]"
        options = ["--rm", "--pid=host", "--user=0", "--entrypoint=python3"]
        self.docker("run", *options, self.image("postprocessor"), "-c", program)

    def logs(self, id: str) -> str:
        """What a container has written."""
        result = subprocess.run(
            [self._docker, "logs", id], env=self.environment, capture_output=True, text=True, check=True
        )
        return result.stdout + result.stderr

    def python(self, container: Container, program: str) -> str:
        """What a program prints that runs inside a container."""
        return self.docker("exec", container.id, "python3", "-c", program)

    def metric(self, container: Container, name: str) -> float:
        """The sum of a metric's series, as the container tells them itself."""
        program = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:9464/metrics').read().decode())"
        lines = self.python(container, program).splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))

    def is_serving(self) -> bool:
        """Whether the gateway says that it reaches all stages."""
        request = health_pb2.HealthCheckRequest(service="neuronpipe.api.v1.InferenceService")
        with grpc.insecure_channel(self.target) as channel:
            try:
                response = health_pb2_grpc.HealthStub(channel).Check(request, timeout=2)
            except grpc.RpcError:
                return False
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    def leftovers(self) -> list[str]:
        """What of the project is still there."""
        label = f"label=com.docker.compose.project={PROJECT}"
        containers = self.docker("ps", "-aq", "--filter", label).split()
        networks = self.docker("network", "ls", "-q", "--filter", label).split()
        volumes = self.docker("volume", "ls", "-q", "--filter", f"name={PROJECT}").split()
        return containers + networks + volumes
