"""Writes the sizes of the images that are built into docs/containers.md, or another page with the same marks.

Run: python docker/sizes.py [PAGE]     the images are those of docker/.env, or of the environment, which goes first
"""

import datetime
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_TARGETS = ("gateway", "tokenizer", "neuron-executor", "postprocessor", "worker", "sagemaker", "compile", "gpu")
_MARKS = re.compile(r"(?<=<!-- sizes: written by make image-sizes -->\n).*?(?=<!-- /sizes -->)", re.DOTALL)


def _settings() -> dict[str, str]:
    lines = (_ROOT / "docker" / ".env").read_text().splitlines()
    return {**dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#")), **os.environ}


def _megabytes(docker: str, image: str) -> int | None:
    """The size of an image; None where there is none of that name."""
    command = [docker, "image", "inspect", "--format", "{{.Size}}", image]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if result.returncode else round(int(result.stdout) / 1e6)


def _table(settings: dict[str, str]) -> Iterator[str]:
    docker = settings.get("DOCKER", "docker")
    base = _megabytes(docker, settings["PYTHON_IMAGE"])
    if base is None:
        sys.exit(f"there is no image {settings['PYTHON_IMAGE']}: run make images first")
    yield from ("| Target | Size | Over its base |", "|---|---:|---:|")
    for target in _TARGETS:
        size = _megabytes(docker, f"{settings['IMAGE_PREFIX']}/{target}:{settings['VERSION']}")
        if size is not None:
            yield f"| `{target}` | {size:,} MB | {size - base:,} MB |"
    yield from ("", f"Measured on {datetime.date.today()}, on a base of {base:,} MB.", "")


def main() -> None:
    """Replaces the table on the page."""
    page = Path(sys.argv[1]) if len(sys.argv) > 1 else _ROOT / "docs" / "containers.md"
    table = "\n".join(_table(_settings()))
    text, count = _MARKS.subn(lambda found: table, page.read_text())
    if count != 1:
        sys.exit(
            f"{page}: has no place for the table, between <!-- sizes: written by make image-sizes --> and "
            "<!-- /sizes -->"
        )
    page.write_text(text)


if __name__ == "__main__":
    main()
