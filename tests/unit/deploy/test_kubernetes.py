"""An endpoint on Kubernetes: the manifests keep every rule of deploy/, and kubectl, a script, is called in order."""

import time
from pathlib import Path
from typing import Any

import pytest

from neuronpipe.core.errors import SetupError
from neuronpipe.deploy import kubernetes
from neuronpipe.deploy.endpoint import Endpoint, ServerlessConfig, take
from neuronpipe.deploy.kubernetes import KubernetesTarget, undeploying
from tests.deploy.combinations import kustomize, rendered
from tests.deploy.objects import Objects
from tests.deploy.rules import RULES
from tests.deploy.schemas import faults_of_schema
from tests.unit.bundles.written import write_bundle
from tests.unit.deploy.programs import Programs

_LOOK = (
    "kubectl get namespace neuronpipe --ignore-not-found -o "
    "jsonpath={.metadata.name} {.metadata.annotations.neuronpipe/endpoint}"
)
_COMPILED = {"get job compile": "SuccessCriteriaMet Complete"}
_SERVERLESS = ServerlessConfig(memory_mb=4096, max_concurrency=10)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    kustomize()  # by the path as it is
    (tmp_path / "bin").mkdir()
    found = Programs(tmp_path / "bin", monkeypatch)
    found.add("kubectl", **_COMPILED)
    found.add("docker")
    return found


def _target(out: Path, *, model_image: str = "", api_key: str = "", **changes: Any) -> KubernetesTarget:
    endpoint = Endpoint(**{"name": "m", "source": "hub/m", "task": "text_classification"} | changes)
    return KubernetesTarget(endpoint, out=out, model_image=model_image, api_key=api_key)


def _deployed(target: KubernetesTarget, *, is_dry: bool = False) -> list[str]:
    said: list[str] = []
    take(target.deploying(), said.append, is_dry=is_dry)
    return said


def _container(objects: Objects, name: str) -> Any:
    return objects.workloads[name].containers[0]


@pytest.mark.parametrize(
    ("changes", "model_image"),
    [
        ({}, ""),
        ({"serverless": _SERVERLESS, "min_executors": 1, "max_executors": 4}, ""),
        ({"backend": "neuronx", "serverless": _SERVERLESS}, ""),
        ({"backend": "torch"}, "example.com/models:2"),
    ],
)
def test_the_manifests_keep_every_rule(
    programs: Programs, tmp_path: Path, changes: dict[str, Any], model_image: str
) -> None:
    out = tmp_path / "out"
    source = {"source": str(write_bundle(tmp_path / "models"))} if model_image else {}
    _deployed(_target(out, model_image=model_image, **source, **changes))
    folders = [out] if model_image else [out, out / "compile"]
    for folder in folders:
        manifests = rendered(folder, kustomize())
        assert [fault for manifest in manifests for fault in faults_of_schema(manifest)] == []
        assert [fault for rule in RULES for fault in rule(Objects(manifests))] == []


def test_sizes_numbers_and_images_are_those_asked_for(programs: Programs, tmp_path: Path) -> None:
    sizes: Any = {"serverless": _SERVERLESS, "min_executors": 1, "max_executors": 4}
    _deployed(_target(tmp_path / "out", **sizes, image_prefix="example.com/np", version="7", dtype="int8"))
    objects = Objects(rendered(tmp_path / "out", kustomize()))
    executor, gateway = _container(objects, "neuron-executor"), _container(objects, "gateway")
    expected = {"requests": {"cpu": "2", "memory": "4096Mi"}, "limits": {"cpu": "2", "memory": "4096Mi"}}
    assert executor.content["resources"] == expected
    assert gateway.environment["NEURONPIPE_GATEWAY_MAX_REQUESTS_IN_FLIGHT"] == "10"
    assert gateway.content["image"] == "example.com/np/gateway:7"
    scaled = objects.of_kind("ScaledObject")["neuron-executor"]["spec"]
    assert (scaled["minReplicaCount"], scaled["maxReplicaCount"]) == (1, 4)
    [check] = objects.workloads["gateway"].checks
    assert check.content["args"] == ["check-deployment", "--model", "m", "gateway"]
    [compiling] = Objects(rendered(tmp_path / "out/compile", kustomize())).workloads.values()
    assert compiling.containers[0].content["args"] == [
        *("compile", "hub/m", "--name", "m", "--repository", "/repository", "--if-missing"),
        *("--task", "text-classification", "--dtype", "int8"),
    ]


def test_a_fixed_number_of_executors_needs_no_autoscaler(programs: Programs, tmp_path: Path) -> None:
    _deployed(_target(tmp_path / "out", min_executors=3, max_executors=3))
    objects = Objects(rendered(tmp_path / "out", kustomize()))
    assert objects.workloads["neuron-executor"].manifest["spec"]["replicas"] == 3
    assert objects.of_kind("ScaledObject") == {}


def test_the_model_is_there_before_what_serves_it(programs: Programs, tmp_path: Path) -> None:
    out = tmp_path / "out"
    target = _target(out)
    _deployed(target)
    calls = [call for call in programs.calls if " create secret " not in call]
    assert calls == [
        _LOOK,
        f"kubectl apply -f {out}/deploy/base/namespace.yaml",
        "kubectl annotate namespace neuronpipe neuronpipe/endpoint=m --overwrite",
        "kubectl -n neuronpipe get secret neuronpipe-callers --ignore-not-found",
        "kubectl -n neuronpipe delete job compile --ignore-not-found",
        f"kubectl apply -k {out}/compile",
        'kubectl -n neuronpipe get job compile -o jsonpath={.status.conditions[?(@.status=="True")].type}',
        f"kubectl apply -k {out}",
        "kubectl -n neuronpipe rollout status deployment/gateway --timeout=1800s",
    ]
    assert target.api_key
    assert f"NEURONPIPE_API_KEY={target.api_key} neuronpipe infer" in target.call()


def test_a_secret_that_is_there_keeps_its_keys(programs: Programs, tmp_path: Path) -> None:
    programs.add("kubectl", **_COMPILED, **{"get secret": "neuronpipe-callers Opaque 1 5d"})
    for given in ("", "a key of the secret"):
        target = _target(tmp_path / "out", api_key=given)
        _deployed(target)
        assert [call for call in programs.calls if " create secret " in call] == []
        assert target.api_key == given


def test_a_broken_compilation_is_not_waited_for(programs: Programs, tmp_path: Path) -> None:
    answers = {"get job compile": "FailureTarget Failed", "logs job/compile": "hub/m: is not a model of the Hub"}
    programs.add("kubectl", **answers)
    with pytest.raises(SetupError, match="the job compile failed: hub/m: is not a model of the Hub"):
        _deployed(_target(tmp_path / "out"))
    assert f"kubectl apply -k {tmp_path / 'out'}" not in programs.calls


def test_a_compilation_is_waited_for(programs: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs.add("kubectl")
    polls: list[float] = []

    def sleep(seconds: float) -> None:
        polls.append(seconds)
        if len(polls) == 3:
            programs.add("kubectl", **_COMPILED)

    monkeypatch.setattr(time, "sleep", sleep)
    _deployed(_target(tmp_path / "out"))
    assert polls == [kubernetes._POLL_S] * 3
    monkeypatch.setattr(kubernetes, "_WAIT_S", 0)
    programs.add("kubectl")
    with pytest.raises(SetupError, match="the job compile is not complete after 0 s; see kubectl describe"):
        _deployed(_target(tmp_path / "out"))


def test_a_bundle_goes_to_the_cluster_in_an_image(programs: Programs, tmp_path: Path) -> None:
    source = str(write_bundle(tmp_path / "models", "classifier", 3))
    _deployed(_target(tmp_path / "out", model_image="example.com/models:2", source=source))
    built, pushed = [call for call in programs.calls if call.startswith("docker")]
    assert built.startswith("docker build --tag example.com/models:2 --file - ")
    assert pushed == "docker push example.com/models:2"
    volumes = [
        workload.volumes["repository"]
        for workload in Objects(rendered(tmp_path / "out", kustomize())).workloads.values()
        if "repository" in workload.volumes
    ]
    image = {"reference": "example.com/models:2", "pullPolicy": "IfNotPresent"}
    assert volumes == [{"name": "repository", "image": image}] * 4


def test_a_dry_run_writes_and_calls_nothing(programs: Programs, tmp_path: Path) -> None:
    target = _target(tmp_path / "out", serverless=_SERVERLESS)
    said = _deployed(target, is_dry=True)
    assert "NEURONPIPE_API_KEY=KEY neuronpipe infer" in target.call()
    assert programs.calls == []
    assert not (tmp_path / "out").exists()
    assert "memory: 4096Mi" in "\n".join(said)


def test_nothing_is_left(programs: Programs) -> None:
    take(undeploying("m"), lambda line: None, is_dry=False)
    assert programs.calls == [
        _LOOK,
        "kubectl delete namespace neuronpipe --ignore-not-found",
        "kubectl delete priorityclass neuronpipe-serving --ignore-not-found",
    ]


def test_another_endpoint_is_neither_replaced_nor_deleted(programs: Programs, tmp_path: Path) -> None:
    programs.add("kubectl", **{"get namespace": "neuronpipe other"})
    for steps in (_target(tmp_path / "out").deploying(), undeploying("m")):
        with pytest.raises(SetupError, match="m: the namespace neuronpipe has the endpoint other, and room for one"):
            take(steps, lambda line: None, is_dry=False)
    assert programs.calls == [_LOOK] * 2
    take(undeploying("other"), lambda line: None, is_dry=False)
    assert len(programs.calls) == 5


def test_a_namespace_that_was_made_by_hand_is_neither_replaced_nor_deleted(programs: Programs, tmp_path: Path) -> None:
    programs.add("kubectl", **{"get namespace": "neuronpipe "})
    for steps in (_target(tmp_path / "out").deploying(), undeploying("m")):
        with pytest.raises(SetupError, match=r"neuronpipe/endpoint=m$"):
            take(steps, lambda line: None, is_dry=False)
    assert programs.calls == [_LOOK] * 2
