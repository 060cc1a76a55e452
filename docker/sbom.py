"""Writes a software bill of materials for each image, of its locks in docker/requirements: CycloneDX 1.6, as JSON.

Run: python docker/sbom.py FOLDER [IMAGE]...   writes FOLDER/IMAGE.cdx.json, of all images if none is named

The same locks give the same bytes: there is no time in it, and the serial number is made of its content.
"""

import re
import sys
import uuid
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path

from cyclonedx.model import Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import DisjunctiveLicense
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from packageurl import PackageURL

_ROOT = Path(__file__).parents[1]
_LOCKS = _ROOT / "docker" / "requirements"
# image → the locks that docker/Dockerfile installs into it
IMAGES: Mapping[str, tuple[str, ...]] = {
    "gateway": ("server", "gateway"),
    "tokenizer": ("server", "tokenizer"),
    "neuron-executor": ("server", "neuron-executor"),
    "postprocessor": ("server", "postprocessor"),
    "worker": ("server", "worker"),
    "sagemaker": ("server", "sagemaker"),
    "compile": ("server", "compile", "torch-cpu"),
    "gpu": ("server", "gpu"),
    "neuron": ("neuron",),
}
_PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", re.MULTILINE)
# Of serial numbers; drawn once.
_NAMESPACE = uuid.UUID("0c2a5c1e-6d0f-4a5b-9f57-2f1d3f6a9b10")


def pins(lock: str) -> Iterator[tuple[str, str]]:
    """Names, in their normal form (PEP 503), and versions of a lock."""
    for name, version in _PIN.findall((_LOCKS / f"{lock}.txt").read_text()):
        yield re.sub(r"[-_.]+", "-", name).lower(), version


def bill_of(image: str, version: str) -> str:
    """The bill of an image. `version`: neuronpipe's."""
    packages: dict[str, str] = {}
    for lock in IMAGES[image]:
        for name, pinned in pins(lock):
            if packages.setdefault(name, pinned) != pinned:
                sys.exit(f"{image}: {name} is {packages[name]} in one lock, and {pinned} in {lock}.txt")
    components = [
        Component(name=name, version=pinned, bom_ref=f"{name}=={pinned}", purl=PackageURL("pypi", None, name, pinned))
        for name, pinned in packages.items()
    ]
    licenses = [DisjunctiveLicense(id="Apache-2.0")]
    own = Component(name="neuronpipe", version=version, bom_ref="neuronpipe", licenses=licenses)
    whole = Component(name=f"neuronpipe/{image}", version=version, type=ComponentType.CONTAINER, bom_ref="image")
    digests = [(lock, sha256((_LOCKS / f"{lock}.txt").read_bytes()).hexdigest()) for lock in IMAGES[image]]
    bom = Bom(
        components=[own, *components],
        serial_number=uuid.uuid5(_NAMESPACE, repr((image, version, digests))),
    )
    bom.metadata.component = whole
    bom.metadata.timestamp = None
    bom.metadata.properties = [Property(name=f"neuronpipe:lock:{lock}.txt", value=digest) for lock, digest in digests]
    bom.register_dependency(whole, [own])
    bom.register_dependency(own, components)
    return make_outputter(bom, OutputFormat.JSON, SchemaVersion.V1_6).output_as_string(indent=2) + "\n"


def main() -> None:
    """Writes the bills."""
    folder, *images = sys.argv[1:]
    found = re.search(r'^__version__ = "(.+)"$', (_ROOT / "services/neuronpipe/__init__.py").read_text(), re.MULTILINE)
    if not found or (unknown := set(images) - IMAGES.keys()):
        sys.exit(f"there is no image {', '.join(unknown)}" if found else "neuronpipe has no version")
    Path(folder).mkdir(parents=True, exist_ok=True)
    for image in images or IMAGES:
        (Path(folder) / f"{image}.cdx.json").write_text(bill_of(image, found[1]))


if __name__ == "__main__":
    main()
