"""An endpoint in containers of this machine, by docker/compose.yaml."""

import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from neuronpipe.core.errors import SetupError, Unavailable
from neuronpipe.core.names import STAGES
from neuronpipe.deploy.endpoint import DeployStep, Endpoint, command, given_bundle, model_name, run_program, shipped

_SERVICES = ("gateway", *STAGES, "redis")
_POLL_S = 0.5
_LAYERS = {"neuronx": "docker/compose.neuron.yaml", "torch": "docker/compose.gpu.yaml"}


class ComposeTarget:
    """Steps by `docker compose`. The endpoint is a Compose project of its own, at ports of 127.0.0.1."""

    # The endpoint's gateway asks for no key.
    api_key = ""

    def __init__(self, endpoint: Endpoint, *, port: int = 50050, http_port: int = 8080, wait_s: float = 1800) -> None:
        """Raises SetupError if Compose does not support the endpoint."""
        if endpoint.min_executors != endpoint.max_executors or not endpoint.min_executors:
            raise SetupError(
                f"min and max: {endpoint.min_executors} and {endpoint.max_executors}; Compose keeps one number of "
                "executors, at least 1; use --to kubernetes, or on one machine deploy/systemd (docs/serverless.md)"
            )
        if not (1 <= port <= 65535 and 1 <= http_port <= 65535) or port == http_port:
            raise SetupError(f"port and http_port: {port} and {http_port}; must be 1 to 65535, and not the same")
        self._endpoint = endpoint
        self.name = endpoint.name
        self._port = port
        self._http_port = http_port
        self.target = f"127.0.0.1:{port}"  # the gateway's address
        self._wait_s = wait_s
        self._bundle = given_bundle(endpoint)
        if not endpoint.task and not self._bundle:
            raise SetupError("task: is needed for --to compose, whose compile step is told it; see --task")

    @property
    def variables(self) -> dict[str, str]:
        endpoint, serverless = self._endpoint, self._endpoint.serverless
        source = f"/sources/{endpoint.name}" if endpoint.folder else endpoint.source
        variables = {
            "COMPOSE_PROJECT_NAME": _project(endpoint.name),
            "IMAGE_PREFIX": endpoint.image_prefix,
            "VERSION": endpoint.version,
            "GATEWAY_PORT": str(self._port),
            "GATEWAY_HTTP_PORT": str(self._http_port),
            "MODEL_SOURCE": source,
            "MODEL_NAME": model_name(endpoint),
            "MODEL_TASK": (self._bundle.spec.task if self._bundle else endpoint.task).replace("_", "-"),
            "MODEL_OPTIONS": f"--dtype={endpoint.dtype}" if endpoint.dtype else "",
        }
        if serverless:
            variables["EXECUTOR_MEMORY"] = f"{serverless.memory_mb}m"
            variables["GATEWAY_MAX_REQUESTS"] = str(serverless.max_concurrency)
        return variables

    def deploying(self) -> Iterator[DeployStep]:
        if self._endpoint.folder:
            yield self._compose("up", "--no-start", "compile")
            yield DeployStep(f"copy {self._endpoint.source} into the volume of the compile step", self._copy)
        scale = f"neuron-executor={self._endpoint.min_executors}"
        yield self._compose("up", "-d", "--scale", scale, *_SERVICES)
        yield DeployStep(f"wait until {self.target} answers", self._wait)

    def call(self) -> str:
        return f"neuronpipe infer --target {self.target} --model {self.variables['MODEL_NAME']} --text TEXT"

    @contextmanager
    def connected(self) -> Iterator[str]:
        """Yields the address at which a client reaches the endpoint."""
        yield self.target

    def _compose(self, *words: str) -> DeployStep:
        return command(*self._words(*words), variables=self.variables)

    def _words(self, *words: str) -> list[str]:
        layer = _LAYERS.get(self._endpoint.backend)
        return _compose_words("docker/compose.yaml", *([layer] if layer else ()), words=words)

    def _copy(self) -> None:
        """Copies the source into a container, where the user can read the copy regardless of the source's rights."""
        source = self._endpoint.folder
        assert source  # noqa: S101 (else there is no such step)
        [container] = run_program(self._words("ps", "-aq", "compile"), self.variables).split()
        with tempfile.TemporaryDirectory() as folder:
            place = f"{self._bundle.spec.name}/{self._bundle.spec.version}" if self._bundle else self._endpoint.name
            shutil.copytree(source, Path(folder) / place, copy_function=shutil.copyfile)
            target_folder = "/repository" if self._bundle else "/sources"
            run_program(["docker", "cp", f"{folder}/.", f"{container}:{target_folder}"], {})

    def _wait(self) -> None:
        from neuronpipe.rpc.client import check_health

        gives_up_s = time.monotonic() + self._wait_s
        while True:
            try:
                check_health(self.target, None, 3.0)
                return
            except Unavailable as error:
                if time.monotonic() > gives_up_s:
                    raise SetupError(f"{self.target} does not answer after {self._wait_s:g} s: {error}") from error
                time.sleep(_POLL_S)


def undeploying(name: str) -> Iterator[DeployStep]:
    """Deletes containers, networks and volumes of an endpoint."""
    words = _compose_words("docker/compose.yaml", words=("down", "--volumes", "--remove-orphans"))
    yield command(*words, variables={"COMPOSE_PROJECT_NAME": _project(name)})


def _project(name: str) -> str:
    return f"neuronpipe-{name}"


def _compose_words(*files: str, words: Sequence[str]) -> list[str]:
    program = ["docker", "compose"]
    if shutil.which("docker-compose"):  # a dry run must not need Docker
        try:
            run_program([*program, "version"], {})
        except SetupError:
            program = ["docker-compose"]
    return [*program, *(part for file in files for part in ("-f", str(shipped(file)))), *words]
