"""Whether objects are what Kubernetes' API takes: no unknown fields, no wrong types."""

import functools
import json
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

from tests.deploy.combinations import Manifest

# The last three minor versions.
VERSIONS = ("1.35", "1.36", "1.37")
_CUSTOM = yaml.safe_load((Path(__file__).parent / "custom_resources.yaml").read_text())


def faults_of_schema(manifest: Manifest) -> Iterator[str]:
    """What the schemas of the API do not allow in an object."""
    group, _, version = manifest["apiVersion"].rpartition("/")
    key = f"{manifest['apiVersion']}/{manifest['kind']}"
    if key in _CUSTOM:
        yield from _faults(_validator_of(_closed(_CUSTOM[key])), manifest, "")
        return
    file = "-".join(filter(None, [manifest["kind"].lower(), group.partition(".")[0], version])) + ".json"
    for of in VERSIONS:
        validator = _validator(of, file)
        if validator is None:
            yield f"Kubernetes {of} has no {key}, and custom_resources.yaml neither"
        else:
            yield from _faults(validator, manifest, f" (Kubernetes {of})")


def _faults(validator: Any, manifest: Manifest, where: str) -> Iterator[str]:
    for error in validator.iter_errors(manifest):
        yield f"{'.'.join(map(str, error.absolute_path))}: {error.message}{where}"


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of an object from the spec's; further fields are refused everywhere."""
    return {
        "type": "object",
        "required": ["apiVersion", "kind", "metadata", "spec"],
        "additionalProperties": False,
        "properties": {"apiVersion": {}, "kind": {}, "metadata": {"type": "object"}, "spec": _strict(schema)},
    }


def _strict(schema: Any) -> Any:
    if isinstance(schema, dict):
        closed = {name: _strict(value) for name, value in schema.items()}
        return {"additionalProperties": False, "type": "object"} | closed if "properties" in schema else closed
    return [_strict(item) for item in schema] if isinstance(schema, list) else schema


@functools.cache
def _validator(version: str, file: str) -> Any:
    """Of kubernetes-validate's strict schemas; None where they have no such kind."""
    schema = _read(version, file)
    return schema and _validator_of(schema, registry=_definitions(version))


def _validator_of(schema: Any, **options: Any) -> Any:
    import jsonschema  # takes two seconds, which those who only collect tests shall not wait

    return jsonschema.Draft202012Validator(schema, **options)


@functools.cache
def _definitions(version: str) -> Any:
    content = _read(version, "_definitions.json")
    return (Resource.from_contents(content, DRAFT202012) @ Registry()).crawl()


def _read(version: str, file: str) -> Any:
    folder = resources.files("kubernetes_validate") / "kubernetes-json-schema" / f"v{version}.0-local-strict"
    found = folder / file
    return json.loads(found.read_text()) if found.is_file() else None
