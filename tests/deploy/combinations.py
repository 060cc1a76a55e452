"""Which components of deploy/ go together, and what kustomize makes of them."""

import itertools
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
_CACHE = ROOT / ".cache"

Manifest: TypeAlias = dict[str, Any]

# The others need the base.
ALONE = ("compile", "compile-neuron", "kserve", "examples/cpu", "examples/eks-inf2")
_BACKENDS = (("cpu",), ("gpu",), ("neuron",))
_MODELS: tuple[tuple[str, ...], ...] = ((), ("model-image",), ("s3",))
_TO_ZERO = ("observability", "keda", "scale-to-zero")
_SCALING = ((), ("observability",), ("observability", "hpa"), ("observability", "keda"), _TO_ZERO)
_ROUTES: tuple[tuple[str, ...], ...] = ((), ("gateway-api",))
_HTTP = ("gateway-api", "http", "gateway-api-http")
_PLAIN = (
    *((*jobs, *route) for jobs in ((), ("jobs",), ("jobs", "jobs-keda")) for route in _ROUTES),
    (*_HTTP, "ingress"),
    ("jobs", "http", "ingress"),
    ("http", "alb"),
)
# Not with what KEDA calls: docs/kubernetes.md says why.
_TLS = (
    *(
        (*jobs, *route, "tls", *(f"{name}-tls" for name in (*jobs, *route)))
        for jobs in ((), ("jobs",))
        for route in _ROUTES
    ),
    (*_HTTP, "tls", "gateway-api-tls"),
    ("http", "ingress", "tls"),
)


def combinations(*, every: bool) -> Iterator[tuple[str, ...]]:
    """Sets of components that docs/kubernetes.md allows, each with `check`, which only adds containers to them, with
    metrics of workers where there are workers and metrics, and with the objects of the Prometheus Operator where there
    are metrics.

    Where not every set is asked for, each two parts that go together are in one of those given.
    """
    pairs = {
        parts: set(itertools.combinations(enumerate(parts), 2))
        for parts in itertools.product(_BACKENDS, _MODELS, _SCALING, (*_PLAIN, *_TLS))
        if not {"scale-to-zero", "tls"} <= {*itertools.chain(*parts)}
    }
    left = set().union(*pairs.values())
    while pairs if every else left:
        parts = max(pairs, key=lambda pair: len(pairs[pair] & left))
        left -= pairs.pop(parts)
        found = tuple(itertools.chain(*parts))
        yield (*found, *_of_metrics({*found}), "registry", "check")


def _of_metrics(found: set[str]) -> Iterator[str]:
    """The components that only add to those found."""
    if "observability" in found:
        yield from ("jobs-observability",) if "jobs" in found else ()
        yield "prometheus-operator"
        yield from ("prometheus-operator-tls",) if "tls" in found else ()


def kustomize() -> str:
    """The program; it is downloaded where it is missing. Ends the process where there is none."""
    found = subprocess.run(
        [DEPLOY / "get-kustomize", _CACHE / "kustomize"], stdout=subprocess.PIPE, text=True, check=False
    )
    if found.returncode:
        raise SystemExit(found.returncode)
    return found.stdout.strip()


def rendered(folder: Path, program: str) -> list[Manifest]:
    """The objects that a kustomization makes. Raises CalledProcessError, whose stderr says why it makes none."""
    made = subprocess.run([program, "build", folder], capture_output=True, text=True, check=True)
    return list(yaml.load_all(made.stdout, yaml.CSafeLoader))


def combined(components: Sequence[str], program: str) -> list[Manifest]:
    """The objects of the base with components. Raises CalledProcessError."""
    _CACHE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_CACHE) as folder:
        to_deploy = os.path.relpath(DEPLOY, os.path.realpath(folder))
        content = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "resources": [f"{to_deploy}/base"],
            "components": [f"{to_deploy}/components/{name}" for name in components],
        }
        (Path(folder) / "kustomization.yaml").write_text(yaml.safe_dump(content))
        return rendered(Path(folder), program)


def all_rendered(program: str, *, every: bool) -> Iterator[tuple[str, list[Manifest]]]:
    """The combinations, and each kustomization that stands alone, with its objects. Raises CalledProcessError."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        sets = list(combinations(every=every))
        for parts, manifests in zip(sets, pool.map(lambda chosen: combined(chosen, program), sets), strict=True):
            yield f"base + {' + '.join(parts)}", manifests
        for name, manifests in zip(ALONE, pool.map(lambda part: rendered(DEPLOY / part, program), ALONE), strict=True):
            yield name, manifests
