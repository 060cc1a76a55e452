"""An endpoint on Kubernetes: a kustomization over deploy/, applied by kubectl."""

import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from neuronpipe.core.errors import SetupError
from neuronpipe.core.names import EXECUTOR, POSTPROCESSOR, STAGES, TOKENIZER
from neuronpipe.deploy.endpoint import (
    DeployStep,
    Endpoint,
    command,
    given_bundle,
    make_bundle,
    model_name,
    run_program,
    shipped,
    written,
)

# The namespace of the base: policies, certificates and scalers have it in their names.
NAMESPACE = "neuronpipe"
# back end → the component, and the image of its executors
_EXECUTORS = {"openvino": ("cpu", EXECUTOR), "neuronx": ("neuron", "neuron"), "torch": ("gpu", "gpu")}
_SERVICES = ("gateway", *STAGES)
_IMAGE_PREFIX = "neuronpipe"
_API = "kustomize.config.k8s.io"
_SECRET = "neuronpipe-callers"  # noqa: S105 (its name)
_WAIT_S = 1800
_WAIT = f"--timeout={_WAIT_S}s"
_POLL_S = 2.0
_LOG_LINES = 10
_CHECK = "/spec/template/spec/initContainers/0/args"
# The namespace's annotation that holds the name of the endpoint.
_ENDPOINT = "neuronpipe/endpoint"


class KubernetesTarget:
    """Steps by kubectl. The cluster compiles a model of the Hub; a folder or bundle goes to the cluster in an image."""

    def __init__(
        self, endpoint: Endpoint, *, out: Path | None = None, model_image: str = "", api_key: str = ""
    ) -> None:
        """`model_image`: an image to push with the bundle. `api_key`: a key of the secret, if it exists."""
        if endpoint.backend not in _EXECUTORS:
            raise SetupError(f"backend {endpoint.backend!r}: must be one of {', '.join(_EXECUTORS)}")
        if endpoint.folder and not model_image:
            advice = "name an image for its bundle that the cluster can pull, by --model-image"
            raise SetupError(f"{endpoint.source}: a cluster does not reach this folder; {advice}")
        if not endpoint.task and not model_image:
            raise SetupError("task: is needed where the cluster compiles the model; see --task")
        self._endpoint = endpoint
        self.name = endpoint.name
        self._out = out or Path(f"neuronpipe-{endpoint.name}")
        self._model_image = model_image
        # The new key, or the given key if the secret exists already.
        self.api_key = api_key

    def deploying(self) -> Iterator[DeployStep]:
        """Applies everything, and waits until gateways reach all stages. Raises SetupError."""
        manifests = shipped("deploy")
        yield _look_for_another(self.name)
        copied = self._out / "deploy"
        yield DeployStep(
            f"copy {manifests} to {copied}", lambda: shutil.copytree(manifests, copied, dirs_exist_ok=True)
        )
        for name, content in self.files().items():
            yield written(self._out / name, _yaml(content))
        if self._model_image:
            yield DeployStep(f"compile {self._endpoint.source}, and push it as {self._model_image}", self._push)
        yield command("kubectl", "apply", "-f", str(self._out / "deploy/base/namespace.yaml"))
        yield command("kubectl", "annotate", "namespace", NAMESPACE, f"{_ENDPOINT}={self.name}", "--overwrite")
        yield DeployStep(f"make the secret {_SECRET} with a key, where it is missing", self._make_key)
        if not self._model_image:
            compiling = ("kubectl", "-n", NAMESPACE)
            yield command(*compiling, "delete", "job", "compile", "--ignore-not-found")
            yield command("kubectl", "apply", "-k", str(self._out / "compile"))
            yield DeployStep("wait until the job compile is complete", _wait_for_job)
        yield command("kubectl", "apply", "-k", str(self._out))
        yield command("kubectl", "-n", NAMESPACE, "rollout", "status", "deployment/gateway", _WAIT)

    def call(self) -> str:
        """Returns the commands of a call; KEY stands for a key that is made later, or was made by another call."""
        key, model = self.api_key or "KEY", model_name(self._endpoint)
        return (
            f"kubectl -n {NAMESPACE} port-forward deployment/gateway 50050 &\n"
            f"NEURONPIPE_API_KEY={key} neuronpipe infer --target 127.0.0.1:50050 --model {model} --text TEXT"
        )

    @contextmanager
    def connected(self) -> Iterator[str]:
        """Yields an address on this machine from which kubectl forwards to the endpoint."""
        words = ["kubectl", "-n", NAMESPACE, "port-forward", "deployment/gateway", ":50050"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as forwarding:  # noqa: S603 (no shell)
            try:
                assert forwarding.stdout  # noqa: S101 (a pipe)
                match = re.search(r"127\.0\.0\.1:\d+", forwarding.stdout.readline())
                if not match:
                    raise SetupError("kubectl does not forward a port to deployment/gateway; see kubectl get pods")
                yield match[0]
            finally:
                forwarding.terminate()

    def files(self) -> dict[str, Mapping[str, Any]]:
        backend = self._endpoint.backend
        scales = self._endpoint.min_executors != self._endpoint.max_executors
        components = [
            f"deploy/components/{_EXECUTORS[backend][0]}",
            *(["deploy/components/model-image"] if self._model_image else ()),
            *(["deploy/components/observability", "deploy/components/keda"] if scales else ()),
            *(["deploy/components/scale-to-zero"] if not self._endpoint.min_executors else ()),
            "settings",
            # The last component, because it copies the output of the others.
            "deploy/components/check",
        ]
        for component in components[:-2]:
            shipped(component)
        replicas = {"name": EXECUTOR, "count": self._endpoint.max_executors}
        files: dict[str, Mapping[str, Any]] = {
            "kustomization.yaml": {
                "apiVersion": f"{_API}/v1beta1",
                "kind": "Kustomization",
                "resources": ["deploy/base"],
                "components": components,
                "images": self._images("gateway", TOKENIZER, _EXECUTORS[backend][1], POSTPROCESSOR),
                "patches": [
                    _replacing(
                        "Deployment",
                        service,
                        {_CHECK: ["check-deployment", "--model", model_name(self._endpoint), service]},
                    )
                    for service in _SERVICES
                ],
            },
            "settings/kustomization.yaml": {
                "apiVersion": f"{_API}/v1alpha1",
                "kind": "Component",
                "patches": [*self._settings(scales=scales)],
                **({} if scales else {"replicas": [replicas]}),
            },
        }
        if not self._model_image:
            neuron = backend == "neuronx"
            files["compile/kustomization.yaml"] = {
                "apiVersion": f"{_API}/v1beta1",
                "kind": "Kustomization",
                "resources": ["../deploy/compile-neuron" if neuron else "../deploy/compile"],
                "images": self._images("neuron" if neuron else "compile"),
                "patches": [self._compile_patch(neuron=neuron)],
            }
        return files

    def _settings(self, *, scales: bool) -> Iterator[Mapping[str, Any]]:
        serverless = self._endpoint.serverless
        if serverless:
            memory = f"{serverless.memory_mb}Mi"
            resources = {"requests": {"memory": memory}, "limits": {"memory": memory}}
            yield _patch(EXECUTOR, containers=[{"name": EXECUTOR, "resources": resources}])
            limit = {"name": "NEURONPIPE_GATEWAY_MAX_REQUESTS_IN_FLIGHT", "value": str(serverless.max_concurrency)}
            yield _patch("gateway", containers=[{"name": "gateway", "env": [limit]}])
        if self._model_image:
            image = {"reference": self._model_image, "pullPolicy": "IfNotPresent"}
            for service in _SERVICES:
                yield _patch(service, volumes=[{"name": "repository", "image": image}])
        if scales:
            counts = {"min": self._endpoint.min_executors, "max": self._endpoint.max_executors}
            values = {f"/spec/{bound}ReplicaCount": count for bound, count in counts.items()}
            yield _replacing("ScaledObject", EXECUTOR, values)

    def _images(self, *names: str) -> list[Mapping[str, str]]:
        prefix, version = self._endpoint.image_prefix, self._endpoint.version
        return [{"name": f"{_IMAGE_PREFIX}/{name}", "newName": f"{prefix}/{name}", "newTag": version} for name in names]

    def _compile_patch(self, *, neuron: bool) -> Mapping[str, Any]:
        endpoint = self._endpoint
        added = ["--bucket", "1x128", "--bucket", "16x128", "--compile-cache", "/sources/neuronx"] if neuron else []
        words = ["compile", endpoint.source, "--name", endpoint.name, "--repository", "/repository", "--if-missing"]
        arguments = [*words, *endpoint.compile_options, *added]
        return _replacing("Job", "compile", {"/spec/template/spec/containers/0/args": arguments})

    def _push(self) -> None:
        with tempfile.TemporaryDirectory(prefix="neuronpipe-") as folder:
            repository = Path(folder) / "models"
            bundle = make_bundle(self._endpoint, repository, lambda line: None)
            if given_bundle(self._endpoint):
                shutil.copytree(bundle.folder, repository / bundle.spec.name / str(bundle.spec.version))
            dockerfile = "FROM scratch\nCOPY . /\n"
            words = ["docker", "build", "--tag", self._model_image, "--file", "-", str(repository)]
            run_program(words, {}, input=dockerfile)
            run_program(["docker", "push", self._model_image], {})

    def _make_key(self) -> None:
        secret = run_program(["kubectl", "-n", NAMESPACE, "get", "secret", _SECRET, "--ignore-not-found"], {})
        if secret.strip():
            return
        from neuronpipe.gateway.callers.keys import create_key

        with tempfile.TemporaryDirectory(prefix="neuronpipe-") as folder:
            keys = Path(folder) / "keys"
            self.api_key = create_key(keys, self._endpoint.name, self._endpoint.name)
            words = ["kubectl", "-n", NAMESPACE, "create", "secret", "generic", _SECRET, f"--from-file=keys={keys}"]
            run_program(words, {})


def undeploying(name: str) -> Iterator[DeployStep]:
    """Deletes the namespace and objects outside namespaces. Raises SetupError if another endpoint has it."""
    yield _look_for_another(name)
    yield command("kubectl", "delete", "namespace", NAMESPACE, "--ignore-not-found")
    yield command("kubectl", "delete", "priorityclass", "neuronpipe-serving", "--ignore-not-found")


def _wait_for_job() -> None:
    """Waits for the end of the job. Raises SetupError with its last log lines if it failed."""
    job = ["kubectl", "-n", NAMESPACE, "get", "job", "compile", "-o"]
    ended = 'jsonpath={.status.conditions[?(@.status=="True")].type}'
    gives_up_s = time.monotonic() + _WAIT_S
    while "Complete" not in (conditions := run_program([*job, ended], {}).split()):
        if "Failed" in conditions:
            words = ["kubectl", "-n", NAMESPACE, "logs", "job/compile", f"--tail={_LOG_LINES}"]
            log_lines = run_program(words, {}).strip() or "it has no log; see kubectl describe job compile"
            raise SetupError(f"the job compile failed: {log_lines}")
        if time.monotonic() > gives_up_s:
            raise SetupError(f"the job compile is not complete after {_WAIT_S} s; see kubectl describe job compile")
        time.sleep(_POLL_S)


def _look_for_another(name: str) -> DeployStep:
    """Returns a step that raises SetupError if the namespace holds another endpoint."""

    def look() -> None:
        path = f"jsonpath={{.metadata.name}} {{.metadata.annotations.{_ENDPOINT}}}"
        words = run_program(["kubectl", "get", "namespace", NAMESPACE, "--ignore-not-found", "-o", path], {}).split()
        if words == [NAMESPACE]:
            raise SetupError(
                f"{name}: the namespace {NAMESPACE} is there, and not of an endpoint; to replace or delete its content "
                f"as {name}: kubectl annotate namespace {NAMESPACE} {_ENDPOINT}={name}"
            )
        if words and words[-1] != name:
            problem = f"the namespace {NAMESPACE} has the endpoint {words[-1]}, and room for one"
            raise SetupError(f"{name}: {problem}; neuronpipe undeploy {words[-1]} --to kubernetes deletes it")

    return DeployStep(f"look whether the namespace {NAMESPACE} has another endpoint", look)


def _patch(deployment: str, **pod: Any) -> Mapping[str, Any]:
    content = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": deployment},
        "spec": {"template": {"spec": pod}},
    }
    return {"patch": _yaml(content)}


def _replacing(kind: str, name: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a patch of an object: the new values by their paths."""
    operations = [{"op": "replace", "path": path, "value": value} for path, value in values.items()]
    return {"target": {"kind": kind, "name": name}, "patch": _yaml(operations)}


def _yaml(content: Any) -> str:
    import yaml

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]
        """Writes texts of several lines as blocks."""

    def represent(dumper: Any, text: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)

    Dumper.add_representer(str, represent)
    return str(yaml.dump(content, Dumper=Dumper, sort_keys=False, width=120))
