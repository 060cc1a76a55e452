"""docs/reference/alerts.md, from docs/alerts.yaml: what to look at and what to do for each alert. The objects for
Kubernetes with the same alerts, and with the dashboard.
"""

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from tests.documentation.pages import ROOT
from tests.reference.markdown import NOTE, code, section_link, table

_ALERTS = ROOT / "docs" / "alerts.yaml"
_DASHBOARD = ROOT / "docs" / "grafana.json"
# Alert → what to read, in docs/.
_READ: Mapping[str, Sequence[str]] = {
    "NeuronpipeLatency": ("performance-tuning.md#find-the-bottleneck", "registry.md#a-versions-way-into-production"),
    "NeuronpipeGone": ("deployment.md#health-checks-readiness-and-liveness",),
    "NeuronpipeProcessUnreachable": ("deployment.md#health-checks-readiness-and-liveness",),
    "NeuronpipeImpaired": ("deployment.md#liveness-and-impaired-executors",),
    "NeuronpipeVersionFailed": ("registry.md#a-versions-way-into-production", "troubleshooting.md#in-the-log"),
    "NeuronpipeNoTraffic": ("deployment.md#proxies", "security.md#refused-credentials"),
    "NeuronpipeErrors": ("troubleshooting.md#unavailable-retry", "troubleshooting.md#internal-a-fault-of-the-server"),
    "NeuronpipeSaturated": ("autoscaling.md", "security.md#quotas"),
    "NeuronpipeCoreLost": ("neuron.md#cores",),
    "NeuronpipeNeuronErrors": ("neuron.md#troubleshooting",),
    "NeuronpipeSheddingLoad": ("overload.md", "security.md#quotas"),
    "NeuronpipeSpansLost": ("tracing.md#exporting-traces-and-metrics",),
    "NeuronpipeRedisUnavailable": ("caching.md#when-redis-fails",),
    "NeuronpipeCertificateExpires": ("security.md#certificate-rotation",),
    "NeuronpipeCertificateRejected": ("security.md#certificate-rotation",),
    "NeuronpipeJobBacklog": ("jobs.md#workers", "troubleshooting.md#jobs"),
    "NeuronpipeDeadLetterJobs": ("troubleshooting.md#jobs",),
    "NeuronpipeFileRejected": ("troubleshooting.md#in-the-log",),
}
_HEAD = f"""# Alerts

{NOTE.format("[alerts.yaml](../alerts.yaml)")}

Each alert carries these texts as its annotations, and a link to its section here as `runbook_url`. The link's host,
`neuronpipe.example`, is a placeholder. Replace it by the host of your copy of these pages: the first lines of the file
have the command, and on Kubernetes it is `runbooks.yaml` of the component
[`prometheus-operator`](../kubernetes.md#components). The texts name panels of the [dashboard](../grafana.json).
[Observability](../observability.md) says how both are installed.

Commands for the steps below. SERVICE is `gateway`, `tokenizer`, `neuron-executor`, `postprocessor` or `worker` (with
Compose also `-f docker/compose.jobs.yaml`):"""
_COMPOSE = "docker compose -f docker/compose.yaml"
_HEALTH = "`neuronpipe health --target 127.0.0.1:50050`"
# Step, on Kubernetes, with Compose.
_STEPS = (
    ("what is ready", "`kubectl -n neuronpipe get pods`", "`make ps`"),
    (
        "stages that a gateway lacks",
        f"`kubectl -n neuronpipe port-forward deployment/gateway 50050`, then {_HEALTH}",
        _HEALTH,
    ),
    (
        "logs",
        "`kubectl -n neuronpipe logs -l app.kubernetes.io/name=SERVICE --tail=200 --prefix`",
        "`make logs service=SERVICE`",
    ),
    (
        "restart a service",
        "`kubectl -n neuronpipe rollout restart deployment/SERVICE`",
        f"`{_COMPOSE} restart SERVICE`",
    ),
    (
        "undo its last change",
        "`kubectl -n neuronpipe rollout undo deployment/SERVICE`",
        f"`VERSION=FORMER {_COMPOSE} up -d --no-build SERVICE`",
    ),
    (
        "add processes",
        "`kubectl -n neuronpipe scale deployment/SERVICE --replicas=3`; with `hpa` or `keda` raise the minimum in the "
        "overlay",
        f"`{_COMPOSE} up -d --scale SERVICE=3`; not the gateway, which publishes a port",
    ),
    (
        "a model's former version",
        "`neuronpipe registry rollback MODEL` undoes the last change of its names and shares, with `--target` or "
        "`--repository` "
        "([registry](../registry.md#a-versions-way-into-production))",
        "the same",
    ),
)


def rules() -> list[Mapping[str, Any]]:
    """The alerts."""
    return [rule for group in yaml.safe_load(_ALERTS.read_text())["groups"] for rule in group["rules"]]


def page() -> str:
    """The page."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield _HEAD
    yield from table(["Step", "On Kubernetes", "With Compose"], _STEPS)
    yield from ("", "All alerts:")
    rows = [
        [f"[{rule['alert']}](#{rule['alert'].lower()})", rule["labels"]["severity"], _meaning(rule)] for rule in rules()
    ]
    yield from table(["Alert", "Severity", "Meaning"], rows)
    for rule in rules():
        yield from (
            "",
            f"## {rule['alert']}",
            "",
            f"“{_meaning(rule)}”. {rule['annotations']['description']}",
            "",
        )
        yield f"- **Look at**: {rule['annotations']['look']}"
        yield f"- **Do**: {rule['annotations']['do']}"
        if rule["alert"] in _READ:
            yield f"- **Read**: {' · '.join(map(section_link, _READ[rule['alert']]))}"
        yield f"- **Fires**: for {code(rule['for'])}" if "for" in rule else "- **Fires**: at once"
        yield from ("", "```text", *textwrap.wrap(rule["expr"], 116, break_on_hyphens=False), "```")


def _meaning(rule: Mapping[str, Any]) -> str:
    summary = re.sub(r"\{\{ \$value[^}]*\}\}", "N", rule["annotations"]["summary"])
    return re.sub(r"\{\{ \$labels\.(?:neuronpipe_)?(\w+) \}\}", lambda label: label[1].upper(), summary)


def prometheus_rule() -> str:
    """The PrometheusRule of the component prometheus-operator."""
    groups = _ALERTS.read_text().partition("groups:\n")[2]
    head = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "neuronpipe", "labels": {"release": "kube-prometheus-stack"}},
    }
    note = NOTE.format("docs/alerts.yaml")
    return f"# {note}\n{yaml.safe_dump(head, sort_keys=False)}spec:\n  groups:\n{textwrap.indent(groups, '  ')}"


def dashboard() -> str:
    """The ConfigMap of the component prometheus-operator, which Grafana's sidecar finds by its label."""
    head = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "neuronpipe-dashboard", "labels": {"grafana_dashboard": "1"}},
    }
    content = textwrap.indent(_DASHBOARD.read_text().rstrip(), "    ")
    note = NOTE.format("docs/grafana.json")
    return f"# {note}\n{yaml.safe_dump(head, sort_keys=False)}data:\n  neuronpipe.json: |\n{content}\n"
