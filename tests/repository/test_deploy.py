"""The rules of tests/deploy see each fault that manifests can have. `make verify-deploy` asks them about deploy/."""

import copy
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.combinations import ALONE, DEPLOY, Manifest, combinations, combined, kustomize, rendered
from tests.deploy.objects import DOCKERFILE, Objects
from tests.deploy.rules import RULES, Rule, cluster, pods, traffic
from tests.deploy.schemas import faults_of_schema

_TARGETS = {*re.findall(r"^FROM .* AS (\S+)$", DOCKERFILE, re.MULTILINE)}
# Together they have every component.
_PLAIN = (
    *("cpu", "observability", "keda", "scale-to-zero", "jobs", "jobs-keda", "gateway-api", "jobs-observability"),
    *("http", "gateway-api-http", "ingress", "alb", "prometheus-operator", "registry", "check"),
)
_TLS = (
    *("neuron", "model-image", "observability", "hpa", "jobs", "gateway-api", "tls", "jobs-tls", "gateway-api-tls"),
    *("jobs-observability", "prometheus-operator", "prometheus-operator-tls", "check"),
)
_S3 = ("gpu", "s3", "check")


@cache
def _rendered(*components: str) -> list[Manifest]:
    return rendered(DEPLOY / "kserve", kustomize()) if components == ("kserve",) else combined(components, kustomize())


class _Set:
    """A rendered set, to be broken."""

    def __init__(self, *components: str) -> None:
        self.manifests = copy.deepcopy(_rendered(*components))

    def __getitem__(self, key: str) -> Any:
        kind, name = key.split("/")
        [found] = [
            manifest for manifest in self.manifests if (manifest["kind"], manifest["metadata"]["name"]) == (kind, name)
        ]
        return found

    def spec(self, name: str) -> Any:
        """The specification of a Deployment's pods."""
        return self[f"Deployment/{name}"]["spec"]["template"]["spec"]

    def container(self, name: str) -> Any:
        """The container of a Deployment."""
        return self.spec(name)["containers"][0]

    def port(self, name: str) -> Any:
        """A port of the gateway's Service."""
        return next(port for port in self["Service/gateway"]["spec"]["ports"] if port["name"] == name)

    def scraped(self) -> Any:
        """What the PodMonitor scrapes of a pod."""
        return self["PodMonitor/neuronpipe"]["spec"]["podMetricsEndpoints"][0]

    def set(self, name: str, variable: str, value: str) -> None:
        """A variable of a Deployment's container."""
        environment, variable = self.container(name)["env"], f"NEURONPIPE_{variable}"
        environment[:] = [env for env in environment if env["name"] != variable] + [{"name": variable, "value": value}]

    def remove(self, *keys: str) -> None:
        """Removes objects."""
        for key in keys:
            self.manifests.remove(self[key])


def _drop_mount(found: _Set) -> None:
    found.container("tokenizer")["volumeMounts"].pop(0)


def _second_autoscaler(found: _Set) -> None:
    second = copy.deepcopy(found["ScaledObject/tokenizer"])
    second["metadata"]["name"] = "other"
    found.manifests.append(second)


# What each rule sees in a set, once it is broken.
_FAULTS: dict[tuple[Rule, tuple[str, ...]], dict[str, Callable[[_Set], object]]] = {
    (traffic.services_select_pods, _PLAIN): {
        "Service tokenizer: selects no pods": lambda broken: broken["Service/tokenizer"]["spec"].update(
            selector={"app.kubernetes.io/name": "tokeniser"}
        ),
        "port 80 is 50050 at Deployment gateway": lambda broken: broken.port("grpc").update(port=80),
    },
    (pods.ports_are_those_of_the_service, _PLAIN): {
        "'grpc': 50051": lambda broken: broken.container("tokenizer")["ports"][0].update(containerPort=50052),
        "'metrics': 9465": lambda broken: broken.set("gateway", "GATEWAY_METRICS_LISTEN", "0.0.0.0:9465"),
        "'metrics': 9464": lambda broken: broken.container("worker")["ports"].pop(),
    },
    (pods.probes_ask_for_what_exists, _PLAIN): {
        "asks for 'InferenceService'": lambda broken: broken.container("gateway")["readinessProbe"]["grpc"].update(
            service="InferenceService"
        ),
        "livenessProbe: asks for": lambda broken: broken.container("gateway").update(
            livenessProbe=broken.container("gateway")["readinessProbe"]
        ),
        "has no startupProbe": lambda broken: broken.container("neuron-executor").pop("startupProbe"),
    },
    (pods.probes_ask_for_what_exists, _TLS): {
        "is plain, and the port has TLS": lambda broken: broken.container("tokenizer").update(
            startupProbe={"grpc": {"port": 50051}}
        )
    },
    (cluster.objects_are_in_one_namespace, _PLAIN): {
        "ScaledObject neuron-executor: is in the namespace of the user": lambda broken: broken[
            "ScaledObject/neuron-executor"
        ]["metadata"].pop("namespace")
    },
    (cluster.secrets_exist, _TLS): {
        "secret tls-tokenizer is made nowhere": lambda broken: broken.remove("Certificate/tokenizer"),
        "PodMonitor neuronpipe: secret tls-prometheus is made nowhere": lambda broken: broken.remove(
            "Certificate/prometheus"
        ),
    },
    (cluster.secrets_exist, _PLAIN): {
        "claim models is made nowhere": lambda broken: broken.spec("gateway")["volumes"][0].update(
            persistentVolumeClaim={"claimName": "models"}
        )
    },
    (pods.graces_fit, _PLAIN): {
        "gets 60 s to end, and may take 141": lambda broken: broken.set("gateway", "GATEWAY_GRACE_S", "120"),
        "has no preStop sleep": lambda broken: broken.container("tokenizer").pop("lifecycle"),
    },
    (pods.updates_wait_for_models, _PLAIN): {
        "Deployment gateway: is given up after 600 s, and may take 600 s to start": lambda broken: broken[
            "Deployment/gateway"
        ]["spec"].pop("progressDeadlineSeconds")
    },
    (pods.settings_exist, _PLAIN): {
        "NEURONPIPE_GATEWAY_MAX_REQUEST_IN_FLIGHT is no setting of it": lambda broken: broken.set(
            "gateway", "GATEWAY_MAX_REQUEST_IN_FLIGHT", "1"
        ),
        "NEURONPIPE_GATEWAY_GRACE_S is no setting of it": lambda broken: broken.set(
            "tokenizer", "GATEWAY_GRACE_S", "1"
        ),
        "less than or equal to 4": lambda broken: broken.set("neuron-executor", "NEURON_EXECUTOR_IN_FLIGHT", "9"),
    },
    (pods.settings_exist, _S3): {
        "String should match pattern": lambda broken: broken.set("gateway", "GATEWAY_HTTP_PATH_PREFIX", "models")
    },
    (pods.images_are_built, _PLAIN): {
        "nobody builds the image neuronpipe/gate:0.1.0": lambda broken: broken.container("gateway").update(
            image="neuronpipe/gate:0.1.0"
        )
    },
    (pods.images_are_built, ("kserve",)): {
        "nobody builds the image neuronpipe/sagemaker:latest": lambda broken: broken[
            "ClusterServingRuntime/neuronpipe"
        ]["spec"]["containers"][0].update(image="neuronpipe/sagemaker:latest")
    },
    (traffic.targets_are_services, _PLAIN): {
        "there is no Service tokeniser with port 50051": lambda broken: broken.set(
            "gateway", "GATEWAY_TOKENIZER_TARGET", "tokeniser:50051"
        ),
        "Service tokenizer: is not headless": lambda broken: broken["Service/tokenizer"]["spec"].pop("clusterIP"),
    },
    (traffic.the_network_lets_through_what_is_needed, _PLAIN): {
        "anywhere reaches tokenizer:50051": lambda broken: broken["NetworkPolicy/tokenizer"]["spec"]["ingress"][0].pop(
            "from"
        ),
        "gateway does not reach neuron-executor:50052": lambda broken: broken["NetworkPolicy/gateway"]["spec"][
            "egress"
        ].pop(1),
        "anywhere does not reach gateway:8080": lambda broken: broken.remove("NetworkPolicy/gateway-http"),
        "tokenizer may call anybody": lambda broken: broken["NetworkPolicy/tokenizer"]["spec"]["egress"].append(
            {"ports": [{"port": 443}]}
        ),
    },
    (traffic.the_network_lets_through_what_is_needed, ("cpu",)): {
        "neuron-executor reaches postprocessor:50053": lambda broken: broken.remove(
            "NetworkPolicy/nothing", "NetworkPolicy/postprocessor"
        ),
        "tokenizer looks up names, and may not": lambda broken: broken.remove("NetworkPolicy/dns"),
    },
    (traffic.the_network_lets_through_what_is_needed, _S3): {
        "neuron-executor does not reach what is outside": lambda broken: broken.remove("NetworkPolicy/repository")
    },
    (pods.one_back_end_that_fits, _PLAIN): {
        "is for the back end torch, not openvino": lambda broken: broken.container("neuron-executor").update(
            image="neuronpipe/gpu:0.1.0"
        ),
        "must be whole: 1500m": lambda broken: broken.container("neuron-executor")["resources"]["limits"].update(
            cpu="1500m"
        ),
    },
    (pods.one_back_end_that_fits, _TLS): {
        "must be whole": lambda broken: broken.container("neuron-executor")["resources"]["limits"].update(
            {"aws.amazon.com/neuroncore": "500m"}
        ),
        "has 2 cores, and its setting is 4": lambda broken: broken.set("neuron-executor", "NEURON_EXECUTOR_CORES", "4"),
    },
    (pods.checks_see_what_services_see, _TLS): {
        "container check: has another env than the service": lambda broken: broken.set(
            "neuron-executor", "NEURON_EXECUTOR_CORES", "4"
        )
    },
    (pods.checks_see_what_services_see, _PLAIN): {
        "does not check gateway": lambda broken: broken.spec("gateway")["initContainers"][0].update(
            args=["check-deployment", "all"]
        )
    },
    (pods.pods_have_no_rights, _PLAIN): {
        "may run as root": lambda broken: broken.spec("gateway")["securityContext"].update(runAsUser=0),
        "or a limit of memory": lambda broken: broken.container("tokenizer")["resources"].pop("limits"),
        "gets the token of its service account": lambda broken: broken.spec("worker").pop(
            "automountServiceAccountToken"
        ),
    },
    (pods.services_refuse_before_memory_is_full, _PLAIN): {
        # 1,024 MiB of messages and as much of answers, 64 held, 64 of results, 64 of /tmp, 128 for the process.
        f"may take {2368 << 20} bytes of memory, and the limit is {1 << 30}": lambda broken: broken.set(
            "gateway", "GATEWAY_MAX_RECEIVING_BYTES", str(1 << 30)
        )
    },
    (cluster.services_stay_available, _PLAIN): {
        "Deployment gateway: has no PodDisruptionBudget": lambda broken: broken.remove("PodDisruptionBudget/gateway"),
        "its priority class does not exist": lambda broken: broken.remove("PriorityClass/neuronpipe-serving"),
    },
    (cluster.autoscaling_has_one_owner, _PLAIN): {
        "tokenizer: scaled by ScaledObject": _second_autoscaler,
        "there is no Service for scaler.neuronpipe.svc.cluster.local:50054": lambda broken: broken.remove(
            "Service/scaler"
        ),
        "nothing brings it back from none": lambda broken: broken["ScaledObject/neuron-executor"]["spec"][
            "triggers"
        ].pop(2),
        "refuses what it is to answer": lambda broken: broken.set("gateway", "GATEWAY_MAX_HELD_REQUESTS", "0"),
    },
    (cluster.autoscaling_has_one_owner, _TLS): {
        "gateway has replicas of its own": lambda broken: broken["Deployment/gateway"]["spec"].update(replicas=2),
        "neuronpipe_load is no metric": lambda broken: broken["HorizontalPodAutoscaler/gateway"]["spec"]["metrics"][0][
            "pods"
        ]["metric"].update(name="neuronpipe_load"),
    },
    (pods.volumes_are_there, _PLAIN): {"/repository is not mounted": _drop_mount},
    (pods.volumes_are_there, _TLS): {
        "NEURONPIPE_GATEWAY_JWKS is /etc/jwks/keys.json, which is not mounted": lambda broken: broken.set(
            "gateway", "GATEWAY_JWKS", "/etc/jwks/keys.json"
        )
    },
    (pods.volumes_are_there, _S3): {
        "has room for 8589934592": lambda broken: broken.spec("neuron-executor")["volumes"][0].update(
            emptyDir={"sizeLimit": "8Gi"}
        ),
        "has room for 0": lambda broken: broken.set("postprocessor", "POSTPROCESSOR_REPOSITORY_CACHE", "/repository"),
    },
    (traffic.callers_are_asked_who_they_are, _PLAIN): {
        "everybody may call it": lambda broken: broken.set("gateway", "GATEWAY_API_KEYS", ""),
        "callers stay with the gateways": lambda broken: broken.set("gateway", "GATEWAY_MAX_CONNECTION_AGE_S", "0"),
    },
    (traffic.callers_are_asked_who_they_are, _TLS): {
        "answers whoever reaches it": lambda broken: broken.set("tokenizer", "TOKENIZER_ALLOWED_PEERS", ""),
        "its certificate is for example.com": lambda broken: broken["Certificate/tokenizer"]["spec"].update(
            dnsNames=["example.com"]
        ),
        "TLS is not on every connection: jobs-redis": lambda broken: broken.remove("Certificate/jobs-redis"),
    },
    (traffic.routes_lead_to_services, _PLAIN): {
        "there is no Service gateway with port 80": lambda broken: broken["GRPCRoute/neuronpipe"]["spec"]["rules"][0][
            "backendRefs"
        ][0].update(port=80),
        "Ingress neuronpipe: there is no Service gateway with port http": lambda broken: broken.port("http").update(
            name="web"
        ),
        "HTTPRoute neuronpipe: neuronpipe.example.com is the hostname of another route": lambda broken: broken[
            "Gateway/neuronpipe"
        ]["spec"]["listeners"][1].update(hostname="neuronpipe.example.com"),
    },
    (traffic.routes_lead_to_services, _TLS): {
        "calls gateway without TLS": lambda broken: broken.remove("BackendTLSPolicy/neuronpipe"),
        "calls gateway without TLS, or as another": lambda broken: broken["BackendTLSPolicy/neuronpipe"]["spec"][
            "validation"
        ].update(hostname="example.com"),
        "calls gateway with TLS, which it does not have": lambda broken: broken.remove(
            *(f"Certificate/{name}" for name in ("gateway", "tokenizer", "worker"))
        ),
    },
    (cluster.configuration_exists, _S3): {
        "NEURONPIPE_TOKENIZER_REPOSITORY is in no ConfigMap": lambda broken: broken["ConfigMap/repository"]["data"].pop(
            "uri"
        ),
        "Deployment gateway: there is no service account neuronpipe": lambda broken: broken.remove(
            "ServiceAccount/neuronpipe"
        ),
    },
    (cluster.configuration_exists, _TLS): {
        "ConfigMap x is made nowhere": lambda broken: broken["BackendTLSPolicy/neuronpipe"]["spec"]["validation"][
            "caCertificateRefs"
        ][0].update(name="x")
    },
    (cluster.monitors_scrape_all_metrics, _PLAIN): {
        "container worker: 0 monitors scrape it": lambda broken: broken["Deployment/worker"]["spec"]["template"][
            "metadata"
        ]["labels"].pop("app.kubernetes.io/part-of"),
        "has no port metric, which is scraped": lambda broken: broken.scraped().update(port="metric"),
        "its metrics have no TLS, and are scraped otherwise": lambda broken: broken.scraped().update(scheme="https"),
        "None is not its name": lambda broken: broken["PodMonitor/neuronpipe"]["spec"].pop("jobLabel"),
    },
    (cluster.monitors_scrape_all_metrics, _TLS): {
        "its metrics have TLS, and are scraped otherwise": lambda broken: broken.scraped().pop("scheme"),
        "its certificate is not for gateway": lambda broken: broken.scraped()["tlsConfig"].update(serverName="gateway"),
    },
    (cluster.kserve_sees_grpc, ("kserve",)): {
        "api is no name of a port for gRPC": lambda broken: broken["ClusterServingRuntime/neuronpipe"]["spec"][
            "containers"
        ][0]["ports"][0].update(name="api")
    },
}


@pytest.mark.parametrize(
    ("rule", "components", "break_it", "expected"),
    [
        pytest.param(*key, break_it, expected, id=f"{key[0].__name__}: {expected}")
        for key, faults in _FAULTS.items()
        for expected, break_it in faults.items()
    ],
)
def test_a_rule_sees(
    rule: Rule, components: tuple[str, ...], break_it: Callable[[_Set], object], expected: str
) -> None:
    found = _Set(*components)
    assert list(rule(Objects(found.manifests))) == []
    break_it(found)
    assert expected in "\n".join(rule(Objects(found.manifests)))


def test_every_rule_is_seen_to_fail() -> None:
    assert {rule for rule, _ in _FAULTS} == set(RULES)


@pytest.mark.parametrize(
    ("break_it", "expected"),
    [
        (lambda broken: broken.container("gateway").update(imagePullpolicy="Always"), "imagePullpolicy"),
        (lambda broken: broken["Deployment/gateway"]["spec"].update(replicas="two"), "'two' is not"),
        (lambda broken: broken["ScaledObject/gateway"]["spec"].update(minReplicas=1), "minReplicas"),
        (
            lambda broken: broken["ScaledObject/gateway"]["spec"]["triggers"][0]["metadata"].update(threshold=1),
            "1 is not of type",
        ),
        (lambda broken: broken["Service/gateway"].update(kind="Servise"), "has no v1/Servise"),
    ],
)
def test_the_schemas_refuse(break_it: Callable[[_Set], object], expected: str) -> None:
    found = _Set(*_PLAIN)
    break_it(found)
    assert expected in "\n".join(fault for manifest in found.manifests for fault in faults_of_schema(manifest))


@pytest.mark.parametrize("name", ["base", *ALONE])
def test_one_line_puts_every_image_behind_a_registry(name: str, tmp_path: Path) -> None:
    prefix = "registry.example.com:5000/team/models"
    copied = shutil.copytree(DEPLOY, tmp_path / "deploy")
    place = copied / "components/registry/prefix.yaml"
    place.write_text(place.read_text().replace("  prefix: neuronpipe\n", f"  prefix: {prefix}\n"))
    folder = copied / name
    if name == "base":
        folder = tmp_path / "overlay"
        folder.mkdir()
        parts = [f"../deploy/components/{part}" for part in _PLAIN]
        (folder / "kustomization.yaml").write_text(
            yaml.safe_dump({"resources": ["../deploy/base"], "components": parts})
        )
    objects = Objects(rendered(folder, kustomize()))
    workloads = [*objects.containers, *(check for workload in objects.workloads.values() for check in workload.checks)]
    images = [str(container.content["image"]) for container in workloads]
    images += [
        container["image"]
        for runtime in objects.of_kind("ClusterServingRuntime").values()
        for container in runtime["spec"]["containers"]
    ]
    foreign = {"redis:7.4-bookworm"}
    names = {path.removeprefix(f"{prefix}/").partition(":")[0] for path in {*images} - foreign}
    assert images
    assert names <= _TARGETS, names
    assert "image-prefix" not in objects.of_kind("ConfigMap")


def test_one_line_names_the_host_of_every_runbook(tmp_path: Path) -> None:
    copied = shutil.copytree(DEPLOY, tmp_path / "deploy")
    place = copied / "components/prometheus-operator/runbooks.yaml"
    place.write_text(place.read_text().replace("  host: neuronpipe.example\n", "  host: pages.example.com/models\n"))
    folder = tmp_path / "overlay"
    folder.mkdir()
    parts = [f"../deploy/components/{one}" for one in ("cpu", "observability", "prometheus-operator")]
    (folder / "kustomization.yaml").write_text(yaml.safe_dump({"resources": ["../deploy/base"], "components": parts}))
    objects = Objects(rendered(folder, kustomize()))
    rules = objects.of_kind("PrometheusRule")["neuronpipe"]["spec"]["groups"][0]["rules"]
    links = {rule["alert"]: rule["annotations"]["runbook_url"] for rule in rules}
    page = "https://pages.example.com/models/docs/reference/alerts.html"
    assert links == {alert: f"{page}#{alert.lower()}" for alert in links}
    assert "runbooks" not in objects.of_kind("ConfigMap")


def test_every_component_is_in_some_combination() -> None:
    components = {path.parent.name for path in (DEPLOY / "components").glob("*/kustomization.yaml")}
    assert {name for parts in combinations(every=False) for name in parts} == components
    assert components == {*_PLAIN, *_TLS, *_S3}
