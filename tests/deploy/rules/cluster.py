"""What a set needs of the cluster, and tells it: secrets, claims, availability, autoscaling, KServe."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from neuronpipe.core.names import instruments
from neuronpipe.core.settings import fields_of, variable_name
from neuronpipe.deploy.kubernetes import NAMESPACE
from neuronpipe.platform.telemetry.prometheus import series_names
from tests.deploy.combinations import ROOT
from tests.deploy.objects import CALLED, INFERENCE, SETTINGS, Objects, Workload, port_of, selects

_PAGES = {name: (ROOT / "docs" / name).read_text() for name in ("kubernetes.md", "autoscaling.md")}
_OF_THE_CLUSTER = {"Namespace", "PriorityClass", "ClusterServingRuntime"}


def objects_are_in_one_namespace(objects: Objects) -> Iterator[str]:
    """Every object is in the namespace that policies, certificates and addresses name. Without one of its own, kubectl
    would take that of the user's context.
    """
    for manifest in objects.manifests:
        namespace = manifest["metadata"].get("namespace")
        if manifest["kind"] not in _OF_THE_CLUSTER and namespace != NAMESPACE:
            yield f"{manifest['kind']} {manifest['metadata']['name']}: is in the namespace {namespace or 'of the user'}"


def secrets_exist(objects: Objects) -> Iterator[str]:
    """Every secret is made by a Certificate, or the page says how to make it; so are claims of volumes."""
    made = {certificate["spec"]["secretName"] for certificate in objects.of_kind("Certificate").values()}
    said = set(re.findall(r"create secret \w+ ([\w-]+)", _PAGES["kubernetes.md"]))
    for where, name in _secrets(objects):
        if name not in made | said:
            yield f"{where}: secret {name} is made nowhere"
    compiled = (ROOT / "deploy" / "compile" / "compile.yaml").read_text()
    for workload in objects.workloads.values():
        for volume in workload.volumes.values():
            claim = volume.get("persistentVolumeClaim", {}).get("claimName")
            if claim and f"kind: PersistentVolumeClaim\nmetadata:\n  name: {claim}\n" not in compiled:
                yield f"{workload}: claim {claim} is made nowhere"


def configuration_exists(objects: Objects) -> Iterator[str]:
    """Every ConfigMap and key that a variable has its value from is in the set; so are service accounts. The page says
    how to make the ConfigMap of an authority.
    """
    for name, policy in objects.of_kind("BackendTLSPolicy").items():
        for reference in policy["spec"]["validation"]["caCertificateRefs"]:
            if f"create configmap {reference['name']} " not in _PAGES["kubernetes.md"]:
                yield f"BackendTLSPolicy {name}: ConfigMap {reference['name']} is made nowhere"
    for workload in objects.workloads.values():
        account = workload.pod.get("serviceAccountName")
        if account and account not in objects.of_kind("ServiceAccount"):
            yield f"{workload}: there is no service account {account}"
        for container in workload.containers:
            for env in container.content.get("env", []):
                if "configMapKeyRef" in env.get("valueFrom", {}) and container.environment[env["name"]] is None:
                    yield f"{container}: {env['name']} is in no ConfigMap"


def _secrets(objects: Objects) -> Iterator[tuple[str, str]]:
    for workload in objects.workloads.values():
        for volume in workload.volumes.values():
            if "secret" in volume:
                yield str(workload), volume["secret"]["secretName"]
        for container in workload.containers:
            for variable in container.content.get("env", []):
                found = variable.get("valueFrom", {}).get("secretKeyRef")
                if found:
                    yield str(container), found["name"]
    for name, monitor in objects.of_kind("PodMonitor").items():
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            tls = endpoint.get("tlsConfig", {})
            shown = [*(tls[part]["secret"] for part in ("ca", "cert") if part in tls), tls.get("keySecret")]
            yield from ((f"PodMonitor {name}", reference["name"]) for reference in shown if reference)
    for issuer in objects.of_kind("Issuer").values():
        if "ca" in issuer["spec"]:
            yield f"Issuer {issuer['metadata']['name']}", issuer["spec"]["ca"]["secretName"]
    for gateway in objects.of_kind("Gateway").values():
        for listener in gateway["spec"]["listeners"]:
            for reference in listener.get("tls", {}).get("certificateRefs", []):
                yield f"Gateway {gateway['metadata']['name']}", reference["name"]


def services_stay_available(objects: Objects) -> Iterator[str]:
    """What answers callers has several pods, on several nodes, a budget for their disruption, and a priority."""
    budgets = [
        budget["spec"] for budget in objects.of_kind("PodDisruptionBudget").values() if budget["spec"]["maxUnavailable"]
    ]
    for workload in objects.workloads.values():
        if workload.pod.get("priorityClassName") not in (None, *objects.of_kind("PriorityClass")):
            yield f"{workload}: its priority class does not exist"
        if workload.is_job or not {container.target for container in workload.containers} & CALLED:
            continue
        if not any(selects(budget["selector"]["matchLabels"], workload.labels) for budget in budgets):
            yield f"{workload}: has no PodDisruptionBudget that lets a node be emptied"
        spreads = workload.pod.get("topologySpreadConstraints", [])
        if not any(selects(spread["labelSelector"]["matchLabels"], workload.labels) for spread in spreads):
            yield f"{workload}: its pods may all be on one node"
        if "priorityClassName" not in workload.pod:
            yield f"{workload}: has no priority"


def autoscaling_has_one_owner(objects: Objects) -> Iterator[str]:
    """What is scaled exists, has one autoscaler and no number of its own; what is asked for is a metric."""
    owners: dict[str, list[str]] = {}
    for kind in ("HorizontalPodAutoscaler", "ScaledObject"):
        for name, manifest in objects.of_kind(kind).items():
            spec = manifest["spec"]
            scaled = spec["scaleTargetRef"]["name"]
            owners.setdefault(scaled, []).append(f"{kind} {name}")
            if scaled not in objects.workloads:
                yield f"{kind} {name}: there is no {scaled}"
            elif "replicas" in objects.workloads[scaled].manifest["spec"]:
                yield f"{kind} {name}: {scaled} has replicas of its own, which every apply would set back"
            yield from (f"{kind} {name}: {metric} is no metric" for metric in _unknown_metrics(spec))
            address = [trigger["metadata"].get("scalerAddress", "") for trigger in spec.get("triggers", [])]
            for host, _, port in (given.partition(":") for given in address if given):
                found = objects.of_kind("Service").get(host.partition(".")[0], {"spec": {"ports": []}})
                if int(port) not in [entry["port"] for entry in found["spec"]["ports"]]:
                    yield f"{kind} {name}: there is no Service for {host}:{port}"
            yield from (f"{kind} {name}: {fault}" for fault in _faults_of_none(objects, scaled, spec))
    for scaled, found_owners in owners.items():
        if len(found_owners) > 1:
            yield f"{scaled}: scaled by {' and '.join(found_owners)}"
    for workload in objects.workloads.values():
        if (
            workload.manifest["kind"] == "Deployment"
            and workload.name not in owners
            and "replicas" not in workload.manifest["spec"]
        ):
            yield f"{workload}: has neither replicas nor an autoscaler"


def _faults_of_none(objects: Objects, scaled: str, spec: Mapping[str, Any]) -> Iterator[str]:
    """What is called by gateways and scaled to none is told of by them, and its requests are held."""
    if spec.get("minReplicaCount") != 0 or scaled not in objects.workloads:
        return
    if not {container.target for container in objects.workloads[scaled].containers} & CALLED:
        return
    if not any(trigger["type"] == "external-push" for trigger in spec["triggers"]):
        yield "nothing brings it back from none"
    for container in objects.containers:
        if container.target == "gateway" and not int(container.setting("max_held_requests")):
            yield f"{container} refuses what it is to answer"


def _unknown_metrics(spec: Mapping[str, Any]) -> Iterator[str]:
    """Metrics that no service has, and that docs/autoscaling.md does not derive from those."""
    known = {series for instrument in instruments() for series in series_names(instrument)}
    derived = set(re.findall(r"as: \"?(\w+)", _PAGES["autoscaling.md"]))
    for name in re.findall(r"neuronpipe_\w+", str(spec)):
        if name not in known | derived:
            yield name


def kserve_sees_grpc(objects: Objects) -> Iterator[str]:
    """KServe sees a port for gRPC by its name: with grpc in it, or h2c for Knative. The service is `serve all`."""
    kind = SETTINGS["sagemaker"]
    known = {variable_name(kind, field) for field in fields_of(kind)}
    for name, runtime in objects.of_kind("ClusterServingRuntime").items():
        [container] = runtime["spec"]["containers"]
        environment = {env["name"]: env["value"] for env in container["env"]}
        yield from (f"ClusterServingRuntime {name}: {env} is no setting" for env in environment.keys() - known)
        [port] = container["ports"]
        if port["name"] != "h2c" and "grpc" not in port["name"]:
            yield f"ClusterServingRuntime {name}: {port['name']} is no name of a port for gRPC"
        asked = container["readinessProbe"]["grpc"]
        listens = port_of(environment[variable_name(kind, "listen")])
        if {port["containerPort"], asked["port"]} != {listens}:
            yield f"ClusterServingRuntime {name}: listens on {listens} only"
        if asked["service"] != INFERENCE:
            yield f"ClusterServingRuntime {name}: asks for {asked['service']}"


def monitors_scrape_all_metrics(objects: Objects) -> Iterator[str]:
    """Where there is a PodMonitor, it scrapes every pod with metrics, with TLS where the port has it, by a name in the
    pod's certificate, and the label `job` is the service's name.
    """
    monitors = objects.of_kind("PodMonitor")
    for workload in objects.workloads.values() if monitors else ():
        scraped = [container for container in workload.containers if "metrics" in container.ports]
        selecting = [
            monitor
            for monitor in monitors.values()
            if selects(monitor["spec"]["selector"]["matchLabels"], workload.labels)
        ]
        if len(selecting) != 1:
            yield from (f"{container}: {len(selecting)} monitors scrape it" for container in scraped)
            continue
        spec = selecting[0]["spec"]
        [endpoint] = spec["podMetricsEndpoints"]
        for container in scraped:
            if endpoint["port"] not in container.ports:
                yield f"{container}: has no port {endpoint['port']}, which is scraped"
            if workload.labels.get(spec.get("jobLabel", "")) != workload.name:
                yield f"{container}: {spec.get('jobLabel')} is not its name"
            has_tls = bool(container.setting("tls_certificate"))
            if has_tls != (endpoint.get("scheme") == "https"):
                yield f"{container}: its metrics have {'TLS' if has_tls else 'no TLS'}, and are scraped otherwise"
            elif has_tls and endpoint["tlsConfig"]["serverName"] not in _names_of(objects, workload):
                yield f"{container}: its certificate is not for {endpoint['tlsConfig']['serverName']}"


def _names_of(objects: Objects, workload: Workload) -> list[str]:
    """The names in the certificate of a workload's pods."""
    secret = workload.volumes.get("tls", {}).get("secret", {}).get("secretName")
    specs = (certificate["spec"] for certificate in objects.of_kind("Certificate").values())
    return [name for spec in specs if spec["secretName"] == secret for name in spec["dnsNames"]]
