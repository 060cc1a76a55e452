"""The rules of tests/deploy see each fault that manifests can have. `make verify-deploy` asks them about deploy/."""

import copy
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest

from tests.deploy.combinations import DEPLOY, Manifest, combinations, combined, kustomize, rendered
from tests.deploy.objects import Objects
from tests.deploy.rules import RULES, Rule, cluster, pods, traffic
from tests.deploy.schemas import faults_of_schema

# Together they have every component.
_PLAIN = (
    *("cpu", "observability", "keda", "scale-to-zero", "jobs", "jobs-keda", "gateway-api", "jobs-observability"),
    *("http", "gateway-api-http", "ingress", "check"),
)
_TLS = (
    *("neuron", "model-image", "observability", "hpa", "jobs", "gateway-api", "tls", "jobs-tls", "gateway-api-tls"),
    *("jobs-observability", "check"),
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
        [found] = [one for one in self.manifests if (one["kind"], one["metadata"]["name"]) == (kind, name)]
        return found

    def spec(self, name: str) -> Any:
        """The specification of a Deployment's pods."""
        return self[f"Deployment/{name}"]["spec"]["template"]["spec"]

    def container(self, name: str) -> Any:
        """The container of a Deployment."""
        return self.spec(name)["containers"][0]

    def port(self, name: str) -> Any:
        """A port of the gateway's Service."""
        return next(one for one in self["Service/gateway"]["spec"]["ports"] if one["name"] == name)

    def set(self, name: str, variable: str, value: str) -> None:
        """A variable of a Deployment's container."""
        environment = self.container(name)["env"]
        environment[:] = [one for one in environment if one["name"] != variable] + [{"name": variable, "value": value}]

    def remove(self, *keys: str) -> None:
        """Removes objects."""
        for key in keys:
            self.manifests.remove(self[key])


def _drop_mount(found: _Set) -> None:
    found.container("tokenizer")["volumeMounts"].pop(0)


def _second_autoscaler(found: _Set) -> None:
    other = copy.deepcopy(found["ScaledObject/tokenizer"])
    other["metadata"]["name"] = "other"
    found.manifests.append(other)


_FAULTS: dict[str, tuple[Rule, tuple[str, ...], Callable[[_Set], object], str]] = {
    "a Service without pods": (
        traffic.services_select_pods,
        _PLAIN,
        lambda one: one["Service/tokenizer"]["spec"].update(selector={"app.kubernetes.io/name": "tokeniser"}),
        "Service tokenizer: selects no pods",
    ),
    "another port of a headless Service": (
        traffic.services_select_pods,
        _PLAIN,
        lambda one: one.port("grpc").update(port=80),
        "port 80 is 50050 at Deployment gateway",
    ),
    "a port on which nobody listens": (
        pods.ports_are_those_of_the_service,
        _PLAIN,
        lambda one: one.container("tokenizer")["ports"][0].update(containerPort=50052),
        "'grpc': 50051",
    ),
    "metrics on another port": (
        pods.ports_are_those_of_the_service,
        _PLAIN,
        lambda one: one.set("gateway", "NEURONPIPE_GATEWAY_METRICS_LISTEN", "0.0.0.0:9465"),
        "'metrics': 9465",
    ),
    "metrics of workers that nobody may read": (
        pods.ports_are_those_of_the_service,
        _PLAIN,
        lambda one: one.container("worker")["ports"].pop(),
        "'metrics': 9464",
    ),
    "a probe of a service that is not there": (
        pods.probes_ask_for_what_exists,
        _PLAIN,
        lambda one: one.container("gateway")["readinessProbe"]["grpc"].update(service="InferenceService"),
        "asks for 'InferenceService'",
    ),
    "liveness that looks at other services": (
        pods.probes_ask_for_what_exists,
        _PLAIN,
        lambda one: one.container("gateway").update(livenessProbe=one.container("gateway")["readinessProbe"]),
        "livenessProbe: asks for",
    ),
    "a plain probe of a port with TLS": (
        pods.probes_ask_for_what_exists,
        _TLS,
        lambda one: one.container("tokenizer").update(startupProbe={"grpc": {"port": 50051}}),
        "is plain, and the port has TLS",
    ),
    "no start-up probe": (
        pods.probes_ask_for_what_exists,
        _PLAIN,
        lambda one: one.container("neuron-executor").pop("startupProbe"),
        "has no startupProbe",
    ),
    "an object in the namespace of whoever applies it": (
        cluster.objects_are_in_one_namespace,
        _PLAIN,
        lambda one: one["ScaledObject/neuron-executor"]["metadata"].pop("namespace"),
        "ScaledObject neuron-executor: is in the namespace of the user",
    ),
    "a secret that nobody makes": (
        cluster.secrets_exist,
        _TLS,
        lambda one: one.remove("Certificate/tokenizer"),
        "secret tls-tokenizer is made nowhere",
    ),
    "a claim that nobody makes": (
        cluster.secrets_exist,
        _PLAIN,
        lambda one: one.spec("gateway")["volumes"][0].update(persistentVolumeClaim={"claimName": "models"}),
        "claim models is made nowhere",
    ),
    "less time to end than requests have": (
        pods.graces_fit,
        _PLAIN,
        lambda one: one.set("gateway", "NEURONPIPE_GATEWAY_GRACE_S", "120"),
        "gets 60 s to end, and may take 141",
    ),
    "an end that callers do not see coming": (
        pods.graces_fit,
        _PLAIN,
        lambda one: one.container("tokenizer").pop("lifecycle"),
        "has no preStop sleep",
    ),
    "gateways that are given up before executors have started": (
        pods.updates_wait_for_models,
        _PLAIN,
        lambda one: one["Deployment/gateway"]["spec"].pop("progressDeadlineSeconds"),
        "Deployment gateway: is given up after 600 s, and may take 600 s to start",
    ),
    "a misspelt setting": (
        pods.settings_exist,
        _PLAIN,
        lambda one: one.set("gateway", "NEURONPIPE_GATEWAY_MAX_REQUEST_IN_FLIGHT", "1"),
        "NEURONPIPE_GATEWAY_MAX_REQUEST_IN_FLIGHT is no setting of it",
    ),
    "a setting of another service": (
        pods.settings_exist,
        _PLAIN,
        lambda one: one.set("tokenizer", "NEURONPIPE_GATEWAY_GRACE_S", "1"),
        "NEURONPIPE_GATEWAY_GRACE_S is no setting of it",
    ),
    "a value out of bounds": (
        pods.settings_exist,
        _PLAIN,
        lambda one: one.set("neuron-executor", "NEURONPIPE_NEURON_EXECUTOR_IN_FLIGHT", "9"),
        "less than or equal to 4",
    ),
    "an image that nobody builds": (
        pods.images_are_built,
        _PLAIN,
        lambda one: one.container("gateway").update(image="neuronpipe/gate:0.1.0"),
        "nobody builds the image neuronpipe/gate:0.1.0",
    ),
    "another tag": (
        pods.images_are_built,
        ("kserve",),
        lambda one: one["ClusterServingRuntime/neuronpipe"]["spec"]["containers"][0].update(
            image="neuronpipe/sagemaker:latest"
        ),
        "nobody builds the image neuronpipe/sagemaker:latest",
    ),
    "a target that is no Service": (
        traffic.targets_are_services,
        _PLAIN,
        lambda one: one.set("gateway", "NEURONPIPE_GATEWAY_TOKENIZER_TARGET", "tokeniser:50051"),
        "there is no Service tokeniser with port 50051",
    ),
    "a stage behind one address": (
        traffic.targets_are_services,
        _PLAIN,
        lambda one: one["Service/tokenizer"]["spec"].pop("clusterIP"),
        "Service tokenizer: is not headless",
    ),
    "a stage that everybody reaches": (
        traffic.the_network_lets_through_what_is_needed,
        _PLAIN,
        lambda one: one["NetworkPolicy/tokenizer"]["spec"]["ingress"][0].pop("from"),
        "anywhere reaches tokenizer:50051",
    ),
    "no policy at all for a stage": (
        traffic.the_network_lets_through_what_is_needed,
        ("cpu",),
        lambda one: one.remove("NetworkPolicy/nothing", "NetworkPolicy/postprocessor"),
        "neuron-executor reaches postprocessor:50053",
    ),
    "a policy that stands in the way": (
        traffic.the_network_lets_through_what_is_needed,
        _PLAIN,
        lambda one: one["NetworkPolicy/gateway"]["spec"]["egress"].pop(1),
        "gateway does not reach neuron-executor:50052",
    ),
    "no names": (
        traffic.the_network_lets_through_what_is_needed,
        ("cpu",),
        lambda one: one.remove("NetworkPolicy/dns"),
        "tokenizer looks up names, and may not",
    ),
    "the image of another back end": (
        pods.one_back_end_that_fits,
        _PLAIN,
        lambda one: one.container("neuron-executor").update(image="neuronpipe/gpu:0.1.0"),
        "is for the back end torch, not openvino",
    ),
    "half a NeuronCore": (
        pods.one_back_end_that_fits,
        _TLS,
        lambda one: one.container("neuron-executor")["resources"]["limits"].update(
            {"aws.amazon.com/neuroncore": "500m"}
        ),
        "must be whole",
    ),
    "another number of cores than the pod has": (
        pods.one_back_end_that_fits,
        _TLS,
        lambda one: one.set("neuron-executor", "NEURONPIPE_NEURON_EXECUTOR_CORES", "4"),
        "has 2 cores, and its setting is 4",
    ),
    "part of a CPU for OpenVINO": (
        pods.one_back_end_that_fits,
        _PLAIN,
        lambda one: one.container("neuron-executor")["resources"]["limits"].update(cpu="1500m"),
        "must be whole: 1500m",
    ),
    "a check of other settings": (
        pods.checks_see_what_services_see,
        _TLS,
        lambda one: one.set("neuron-executor", "NEURONPIPE_NEURON_EXECUTOR_CORES", "4"),
        "container check: has another env than the service",
    ),
    "a check of another service": (
        pods.checks_see_what_services_see,
        _PLAIN,
        lambda one: one.spec("gateway")["initContainers"][0].update(args=["check-deployment", "all"]),
        "does not check gateway",
    ),
    "root": (
        pods.pods_have_no_rights,
        _PLAIN,
        lambda one: one.spec("gateway")["securityContext"].update(runAsUser=0),
        "may run as root",
    ),
    "no limit of memory": (
        pods.pods_have_no_rights,
        _PLAIN,
        lambda one: one.container("tokenizer")["resources"].pop("limits"),
        "or a limit of memory",
    ),
    "more messages at once than there is memory": (
        pods.services_refuse_before_memory_is_full,
        _PLAIN,
        lambda one: one.set("gateway", "NEURONPIPE_GATEWAY_MAX_RECEIVING_BYTES", str(1 << 30)),
        # 1,024 MiB of messages and as much of answers, 64 held, 64 of results, 64 of /tmp, 128 for the process.
        f"may take {2368 << 20} bytes of memory, and the limit is {1 << 30}",
    ),
    "the token of an account": (
        pods.pods_have_no_rights,
        _PLAIN,
        lambda one: one.spec("worker").pop("automountServiceAccountToken"),
        "gets the token of its service account",
    ),
    "no budget for disruption": (
        cluster.services_stay_available,
        _PLAIN,
        lambda one: one.remove("PodDisruptionBudget/gateway"),
        "Deployment gateway: has no PodDisruptionBudget",
    ),
    "a priority that is not there": (
        cluster.services_stay_available,
        _PLAIN,
        lambda one: one.remove("PriorityClass/neuronpipe-serving"),
        "its priority class does not exist",
    ),
    "two autoscalers": (
        cluster.autoscaling_has_one_owner,
        _PLAIN,
        _second_autoscaler,
        "tokenizer: scaled by ScaledObject",
    ),
    "an autoscaler and a number": (
        cluster.autoscaling_has_one_owner,
        _TLS,
        lambda one: one["Deployment/gateway"]["spec"].update(replicas=2),
        "gateway has replicas of its own",
    ),
    "a metric that is not there": (
        cluster.autoscaling_has_one_owner,
        _TLS,
        lambda one: one["HorizontalPodAutoscaler/gateway"]["spec"]["metrics"][0]["pods"]["metric"].update(
            name="neuronpipe_load"
        ),
        "neuronpipe_load is no metric",
    ),
    "a scaler that is not there": (
        cluster.autoscaling_has_one_owner,
        _PLAIN,
        lambda one: one.remove("Service/scaler"),
        "there is no Service for scaler.neuronpipe.svc.cluster.local:50054",
    ),
    "executors that nothing brings back": (
        cluster.autoscaling_has_one_owner,
        _PLAIN,
        lambda one: one["ScaledObject/neuron-executor"]["spec"]["triggers"].pop(2),
        "nothing brings it back from none",
    ),
    "a gateway that refuses what it should hold": (
        cluster.autoscaling_has_one_owner,
        _PLAIN,
        lambda one: one.set("gateway", "NEURONPIPE_GATEWAY_MAX_HELD_REQUESTS", "0"),
        "refuses what it is to answer",
    ),
    "no models": (pods.volumes_are_there, _PLAIN, _drop_mount, "/repository is not mounted"),
    "a file that is not mounted": (
        pods.volumes_are_there,
        _TLS,
        lambda one: one.set("gateway", "NEURONPIPE_GATEWAY_JWKS", "/etc/jwks/keys.json"),
        "NEURONPIPE_GATEWAY_JWKS is /etc/jwks/keys.json, which is not mounted",
    ),
    "a gateway for everybody": (
        traffic.callers_are_asked_who_they_are,
        _PLAIN,
        lambda one: one.set("gateway", "NEURONPIPE_GATEWAY_API_KEYS", ""),
        "everybody may call it",
    ),
    "callers who stay where they are": (
        traffic.callers_are_asked_who_they_are,
        _PLAIN,
        lambda one: one.set("gateway", "NEURONPIPE_GATEWAY_MAX_CONNECTION_AGE_S", "0"),
        "callers stay with the gateways",
    ),
    "a stage that answers every certificate": (
        traffic.callers_are_asked_who_they_are,
        _TLS,
        lambda one: one.set("tokenizer", "NEURONPIPE_TOKENIZER_ALLOWED_PEERS", ""),
        "answers whoever reaches it",
    ),
    "a certificate for another name": (
        traffic.callers_are_asked_who_they_are,
        _TLS,
        lambda one: one["Certificate/tokenizer"]["spec"].update(dnsNames=["example.com"]),
        "its certificate is for example.com",
    ),
    "a route to nowhere": (
        traffic.routes_lead_to_services,
        _PLAIN,
        lambda one: one["GRPCRoute/neuronpipe"]["spec"]["rules"][0]["backendRefs"][0].update(port=80),
        "there is no Service gateway with port 80",
    ),
    "an Ingress to nowhere": (
        traffic.routes_lead_to_services,
        _PLAIN,
        lambda one: one.port("http").update(name="web"),
        "Ingress neuronpipe: there is no Service gateway with port http",
    ),
    "two routes of one name": (
        traffic.routes_lead_to_services,
        _PLAIN,
        lambda one: one["Gateway/neuronpipe"]["spec"]["listeners"][1].update(hostname="neuronpipe.example.com"),
        "HTTPRoute neuronpipe: neuronpipe.example.com is the hostname of another route",
    ),
    "HTTP that is closed": (
        traffic.the_network_lets_through_what_is_needed,
        _PLAIN,
        lambda one: one.remove("NetworkPolicy/gateway-http"),
        "anywhere does not reach gateway:8080",
    ),
    "a bucket that nobody names": (
        cluster.configuration_exists,
        _S3,
        lambda one: one["ConfigMap/repository"]["data"].pop("uri"),
        "NEURONPIPE_TOKENIZER_REPOSITORY is in no ConfigMap",
    ),
    "a service account that is not there": (
        cluster.configuration_exists,
        _S3,
        lambda one: one.remove("ServiceAccount/neuronpipe"),
        "Deployment gateway: there is no service account neuronpipe",
    ),
    "a value of another form": (
        pods.settings_exist,
        _S3,
        lambda one: one.set("gateway", "NEURONPIPE_GATEWAY_HTTP_PATH_PREFIX", "models"),
        "String should match pattern",
    ),
    "more bundles than there is room for": (
        pods.volumes_are_there,
        _S3,
        lambda one: one.spec("neuron-executor")["volumes"][0].update(emptyDir={"sizeLimit": "8Gi"}),
        "has room for 8589934592",
    ),
    "bundles in a file system that cannot be written": (
        pods.volumes_are_there,
        _S3,
        lambda one: one.set("postprocessor", "NEURONPIPE_POSTPROCESSOR_REPOSITORY_CACHE", "/repository"),
        "has room for 0",
    ),
    "a bucket out of reach": (
        traffic.the_network_lets_through_what_is_needed,
        _S3,
        lambda one: one.remove("NetworkPolicy/repository"),
        "neuron-executor does not reach what is outside",
    ),
    "stages that may call anybody": (
        traffic.the_network_lets_through_what_is_needed,
        _PLAIN,
        lambda one: one["NetworkPolicy/tokenizer"]["spec"]["egress"].append({"ports": [{"port": 443}]}),
        "tokenizer may call anybody",
    ),
    "a route without TLS to a gateway that has it": (
        traffic.routes_lead_to_services,
        _TLS,
        lambda one: one.remove("BackendTLSPolicy/neuronpipe"),
        "calls gateway without TLS",
    ),
    "a route that takes the gateway for another": (
        traffic.routes_lead_to_services,
        _TLS,
        lambda one: one["BackendTLSPolicy/neuronpipe"]["spec"]["validation"].update(hostname="example.com"),
        "calls gateway without TLS, or as another",
    ),
    "a route with TLS to a gateway that has none": (
        traffic.routes_lead_to_services,
        _TLS,
        lambda one: one.remove(*(f"Certificate/{name}" for name in ("gateway", "tokenizer", "worker"))),
        "calls gateway with TLS, which it does not have",
    ),
    "an authority that nobody copies": (
        cluster.configuration_exists,
        _TLS,
        lambda one: one["BackendTLSPolicy/neuronpipe"]["spec"]["validation"]["caCertificateRefs"][0].update(name="x"),
        "ConfigMap x is made nowhere",
    ),
    "jobs without TLS beside services that have it": (
        traffic.callers_are_asked_who_they_are,
        _TLS,
        lambda one: one.remove("Certificate/jobs-redis"),
        "TLS is not on every connection: jobs-redis",
    ),
    "a port whose name tells KServe nothing": (
        cluster.kserve_sees_grpc,
        ("kserve",),
        lambda one: one["ClusterServingRuntime/neuronpipe"]["spec"]["containers"][0]["ports"][0].update(name="api"),
        "api is no name of a port for gRPC",
    ),
}


@pytest.mark.parametrize("fault", _FAULTS)
def test_a_rule_sees(fault: str) -> None:
    rule, components, break_it, expected = _FAULTS[fault]
    found = _Set(*components)
    assert list(rule(Objects(found.manifests))) == []
    break_it(found)
    assert expected in "\n".join(rule(Objects(found.manifests)))


def test_every_rule_is_seen_to_fail() -> None:
    assert {rule for rule, *_ in _FAULTS.values()} == set(RULES)


def _schema_faults(found: _Set) -> Iterator[str]:
    for manifest in found.manifests:
        yield from faults_of_schema(manifest)


@pytest.mark.parametrize(
    ("break_it", "expected"),
    [
        (lambda one: one.container("gateway").update(imagePullpolicy="Always"), "imagePullpolicy"),
        (lambda one: one["Deployment/gateway"]["spec"].update(replicas="two"), "'two' is not"),
        (lambda one: one["ScaledObject/gateway"]["spec"].update(minReplicas=1), "minReplicas"),
        (
            lambda one: one["ScaledObject/gateway"]["spec"]["triggers"][0]["metadata"].update(threshold=1),
            "1 is not of type",
        ),
        (lambda one: one["Service/gateway"].update(kind="Servise"), "has no v1/Servise"),
    ],
)
def test_the_schemas_refuse(break_it: Callable[[_Set], object], expected: str) -> None:
    found = _Set(*_PLAIN)
    break_it(found)
    assert expected in "\n".join(_schema_faults(found))


def test_every_component_is_in_some_combination() -> None:
    components = {path.parent.name for path in (DEPLOY / "components").glob("*/kustomization.yaml")}
    assert {name for parts in combinations(every=False) for name in parts} == components
    assert components == {*_PLAIN, *_TLS, *_S3}
