"""Who reaches whom: Services, targets, policies, authentication, certificates and routes."""

import ipaddress
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from neuronpipe.core.settings import fields_of
from tests.deploy.objects import SETTINGS, Container, Objects, Workload, is_of_bucket

# Whoever is not one of the pods.
_ANYWHERE = "anywhere"
# Ports of the gateway for them.
_DOORS = ("grpc", "http")


def services_select_pods(objects: Objects) -> Iterator[str]:
    """Every Service has pods, and its ports are theirs. Headless ones are called at the port of the pod."""
    for name, service in objects.of_kind("Service").items():
        selected = objects.selected(name)
        if not selected:
            yield f"Service {name}: selects no pods"
        for port in service["spec"]["ports"]:
            for workload in selected:
                found = workload.ports.get(port["targetPort"])
                if found is None:
                    yield f"Service {name}: {workload} has no port {port['targetPort']}"
                elif found != port["port"]:
                    yield f"Service {name}: port {port['port']} is {found} at {workload}"


def targets_are_services(objects: Objects) -> Iterator[str]:
    """What a service calls is a Service here, with that port; stages are headless, as the gateway balances itself."""
    for caller, host, port in _calls(objects):
        found = objects.of_kind("Service").get(host)
        if found is None or port not in [entry["port"] for entry in found["spec"]["ports"]]:
            yield f"{caller}: there is no Service {host} with port {port}"
        elif caller.target == "gateway" and "redis" not in host and found["spec"].get("clusterIP") != "None":
            yield f"Service {host}: is not headless"


def _calls(objects: Objects) -> Iterator[tuple[Container, str, int]]:
    """container → the host and port that its settings name, inside the namespace."""
    for container in objects.containers:
        for name, value in container.environment.items():
            if name.endswith(("_TARGET", "REDIS_URL")) and value:
                host, _, port = re.sub(r"^\w+://|/.*$", "", value).partition(":")
                yield container, host, int(port)


def the_network_lets_through_what_is_needed(objects: Objects) -> Iterator[str]:
    """Between pods exactly the calls that settings name, and from outside the gateway's ports and metrics alone."""
    workloads = [workload for workload in objects.workloads.values() if not workload.is_job]
    if not workloads:
        return
    needed = {
        (caller.workload.name, callee.name, port)
        for caller, host, port in _calls(objects)
        for callee in objects.selected(host)
    }
    callers: list[Workload | str] = [*workloads, _ANYWHERE]
    for callee in workloads:
        for port_name, port in callee.ports.items():
            for caller in callers:
                is_open = _may_enter(objects, caller, callee, port_name, port) and (
                    isinstance(caller, str) or _may_leave(objects, caller, callee, port)
                )
                name = caller if isinstance(caller, str) else caller.name
                is_door = callee.name == "gateway" and port_name in _DOORS
                is_needed = (name, callee.name, port) in needed or (is_door and caller == _ANYWHERE)
                # Callers of the gateway from outside may also call from here.
                if is_open and not is_needed and not is_door:
                    yield f"network: {name} reaches {callee.name}:{port}, which it does not need"
                if is_needed and not is_open:
                    yield f"network: {name} does not reach {callee.name}:{port}"
    buckets = {
        container.workload.name
        for container in objects.containers
        if container.target in SETTINGS and is_of_bucket(container)
    }
    outside = buckets | {"worker"}
    for workload in workloads:
        may_leave = _may_leave(objects, workload, _ANYWHERE, 443)
        if may_leave and workload.name not in outside:
            yield f"network: {workload.name} may call anybody, which it does not need"
        if workload.name in outside and not may_leave:
            yield f"network: {workload.name} does not reach what is outside"
    resolving = {caller.workload.name for caller, _, _ in _calls(objects)} | outside
    for workload in workloads:
        if (workload.name in resolving) and not _resolves_names(objects, workload):
            yield f"network: {workload.name} looks up names, and may not"


def _policies(objects: Objects, workload: Workload, direction: str) -> list[Mapping[str, Any]]:
    specs = [policy["spec"] for policy in objects.of_kind("NetworkPolicy").values()]
    return [
        spec for spec in specs if direction in spec["policyTypes"] and _matches(spec["podSelector"], workload.labels)
    ]


def _matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    expressions = selector.get("matchExpressions", [])
    return all(labels.get(expression["key"]) in expression["values"] for expression in expressions) and (
        selector.get("matchLabels", {}).items() <= labels.items()
    )


def _may_enter(objects: Objects, caller: Workload | str, callee: Workload, port_name: str, port: int) -> bool:
    policies = _policies(objects, callee, "Ingress")
    rules = [rule for policy in policies for rule in policy.get("ingress", [])]
    return not policies or any(
        _admits(rule.get("from"), caller, rule.get("ports"), (port_name, port)) for rule in rules
    )


def _may_leave(objects: Objects, caller: Workload, callee: Workload | str, port: int) -> bool:
    policies = _policies(objects, caller, "Egress")
    rules = [rule for policy in policies for rule in policy.get("egress", [])]
    return not policies or any(_admits(rule.get("to"), callee, rule.get("ports"), (port,)) for rule in rules)


def _admits(
    peers: Sequence[Mapping[str, Any]] | None,
    other: Workload | str,
    ports: Sequence[Mapping[str, Any]] | None,
    port: Sequence[Any],
) -> bool:
    """Whether a rule of a policy lets the other side through; one without peers, or ports, lets all through."""
    known = ports is None or any(allowed.get("port") in port for allowed in ports)
    if not known or peers is None:
        return known
    if isinstance(other, str):
        return any(_is_everybody(peer) for peer in peers)
    return any(
        "podSelector" in peer and "namespaceSelector" not in peer and _matches(peer["podSelector"], other.labels)
        for peer in peers
    )


def _is_everybody(peer: Mapping[str, Any]) -> bool:
    block = peer.get("ipBlock", {}).get("cidr")
    return peer.get("namespaceSelector") == {} or bool(block and ipaddress.ip_network(block).prefixlen == 0)


def _resolves_names(objects: Objects, workload: Workload) -> bool:
    rules = [rule for policy in _policies(objects, workload, "Egress") for rule in policy.get("egress", [])]
    open_ports = {(port.get("port"), port.get("protocol", "TCP")) for rule in rules for port in rule.get("ports", [])}
    return {(53, "UDP"), (53, "TCP")} <= open_ports


def callers_are_asked_who_they_are(objects: Objects) -> Iterator[str]:
    """A gateway has authentication, callers come back to new ones, and stages with TLS answer the gateway alone."""
    for container in objects.containers:
        if container.target == "gateway":
            if not any(container.setting(name) for name in ("api_keys", "jwks", "tls_client_ca")):
                yield f"{container}: everybody may call it"
            if not float(container.setting("max_connection_age_s")):
                yield f"{container}: callers stay with the gateways that they have found first"
            if bool(container.setting("tls_ca")) != bool(container.setting("tls_certificate")):
                yield f"{container}: has TLS on one side only"
        elif _has_tls(container) and not (container.setting("tls_client_ca") and container.setting("allowed_peers")):
            yield f"{container}: answers whoever reaches it"
    certificates = objects.of_kind("Certificate")
    for workload in objects.workloads.values():
        secret = workload.volumes.get("tls", {}).get("secret", {}).get("secretName")
        made = [
            certificate["spec"] for certificate in certificates.values() if certificate["spec"]["secretName"] == secret
        ]
        if made and not {workload.name, "localhost"} <= set(made[0]["dnsNames"]):
            yield f"{workload}: its certificate is for {', '.join(made[0]['dnsNames'])}"
    if certificates and (plain := [service for service in objects.of_kind("Service") if service not in certificates]):
        yield f"TLS is not on every connection: {', '.join(plain)}"


def _has_tls(stage: Container) -> bool:
    is_stage = stage.target in SETTINGS and "allowed_peers" in fields_of(SETTINGS[stage.target])
    return is_stage and bool(stage.setting("tls_certificate"))


def routes_lead_to_services(objects: Objects) -> Iterator[str]:
    """Each route has a listener of a Gateway for itself. Routes and Ingresses have a Service with their port."""
    routes = [route for kind in ("GRPCRoute", "HTTPRoute") for route in objects.of_kind(kind).values()]
    taken: set[str] = set()
    for route in routes:
        name = f"{route['kind']} {route['metadata']['name']}"
        for parent in route["spec"]["parentRefs"]:
            gateway = objects.of_kind("Gateway").get(parent["name"], {"spec": {"listeners": []}})
            listeners = {listener["name"]: listener for listener in gateway["spec"]["listeners"]}
            listener = listeners.get(parent.get("sectionName"))
            if listener is None:
                yield f"{name}: there is no listener {parent.get('sectionName')}"
            elif listener["hostname"] not in route["spec"]["hostnames"] or listener["hostname"] in taken:
                yield f"{name}: {listener['hostname']} is the hostname of another route"
            else:
                taken.add(listener["hostname"])
        for backend in (ref for rule in route["spec"]["rules"] for ref in rule["backendRefs"]):
            if not _has_port(objects, backend["name"], "port", backend["port"]):
                yield f"{name}: there is no Service {backend['name']} with port {backend['port']}"
            verified = backend["name"] in _verified(objects)
            if objects.of_kind("Certificate") and not verified:
                yield f"{name}: calls {backend['name']} without TLS, or as another"
            if objects.of_kind("BackendTLSPolicy") and not verified:
                yield f"{name}: calls {backend['name']} with TLS, which it does not have, or as another"
    for name, ingress in objects.of_kind("Ingress").items():
        for path in (path for rule in ingress["spec"]["rules"] for path in rule["http"]["paths"]):
            backend = path["backend"]["service"]
            if not _has_port(objects, backend["name"], "name", backend["port"]["name"]):
                yield f"Ingress {name}: there is no Service {backend['name']} with port {backend['port']['name']}"


def _has_port(objects: Objects, service: str, key: str, value: object) -> bool:
    found = objects.of_kind("Service").get(service, {"spec": {"ports": []}})
    return value in [port[key] for port in found["spec"]["ports"]]


def _verified(objects: Objects) -> Iterator[str]:
    """The Services that listeners of Gateways call over TLS, by a name in their certificate."""
    for policy in objects.of_kind("BackendTLSPolicy").values():
        for target in policy["spec"]["targetRefs"]:
            certificate = objects.of_kind("Certificate").get(target["name"], {"spec": {"dnsNames": []}})
            ports = objects.of_kind("Service")[target["name"]]["spec"]["ports"]
            if (
                policy["spec"]["validation"]["hostname"] in certificate["spec"]["dnsNames"]
                and target.get("sectionName", ports[0]["name"]) in [port["name"] for port in ports]
                and not any("appProtocol" in port for port in ports)  # h2c is HTTP/2 without TLS
            ):
                yield target["name"]
