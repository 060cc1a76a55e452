"""tests/deploy/rules/: manifests with one fault each, which a rule names."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from tests.deploy.combinations import Manifest, combined, kustomize
from tests.deploy.objects import Objects
from tests.deploy.rules import RULES


@pytest.fixture(scope="module")
def manifests() -> list[Manifest]:
    return combined(("cpu", "jobs"), kustomize())


def _container(kind: str, name: str, change: Callable[[Any], None]) -> Callable[[list[Manifest]], None]:
    return lambda manifests: change(_spec(manifests, kind, name)["template"]["spec"]["containers"][0])


def _spec(manifests: list[Manifest], kind: str, name: str) -> Any:
    [found] = [manifest for manifest in manifests if (manifest["kind"], manifest["metadata"]["name"]) == (kind, name)]
    return found["spec"]


def _faults(manifests: list[Manifest]) -> list[str]:
    return [fault for rule in RULES for fault in rule(Objects(manifests))]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (
            lambda broken: _spec(broken, "NetworkPolicy", "nothing").update(policyTypes=["Ingress"]),
            "network: neuron-executor may call anybody, which it does not need",
        ),
        (
            lambda broken: _spec(broken, "NetworkPolicy", "worker")["egress"].pop(),
            "network: worker does not reach what is outside",
        ),
        (
            lambda broken: _spec(broken, "PodDisruptionBudget", "gateway").update(maxUnavailable=0),
            "Deployment gateway: has no PodDisruptionBudget that lets a node be emptied",
        ),
        (
            _container(
                "Deployment", "gateway", lambda broken: broken["volumeMounts"][2].update(mountPath="/etc/neuronpipe/c")
            ),
            "NEURONPIPE_GATEWAY_API_KEYS is /etc/neuronpipe/callers/keys, which is not mounted",
        ),
        (
            _container("Deployment", "gateway", lambda broken: broken["resources"]["limits"].update(memory="800M")),
            "and the limit is 800000000",
        ),
    ],
)
def test_a_fault_is_found(manifests: list[Manifest], change: Callable[[list[Manifest]], None], fault: str) -> None:
    changed = copy.deepcopy(manifests)
    change(changed)
    assert _faults(manifests) == []
    assert fault in "\n".join(_faults(changed))
