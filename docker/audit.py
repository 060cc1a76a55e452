"""Asks an index of advisories for known vulnerabilities of what the locks of docker/requirements pin, by pip-audit.

Run: python docker/audit.py [--osv-url URL] [--required]

Exit codes: 0 none is known, or the index does not answer, and a line says what was not checked; 1 one is known;
3 something was not checked, with --required.
"""

import argparse
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

_LOCKS = Path(__file__).parent / "requirements"
# Without what comes after a plus: an index knows no local versions, as of PyTorch without CUDA.
_PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\+]+)", re.MULTILINE)
# It has advisories since 2014. An index that has none for it answers without telling anything, as some proxies do.
_VULNERABLE = ("jinja2", "2.4.1")
# Packages of one run. Where the index fails in between, what the run has found is lost, and all of them count as not
# checked.
_AT_ONCE = 25
_FOUND, _NOT_CHECKED = 1, 3

Pin: TypeAlias = tuple[str, str]


class _NoAnswer(Exception):
    """The index does not answer. The message is pip-audit's last line."""


def _pins() -> dict[Pin, list[str]]:
    """Every package and version, and the locks that have it."""
    found = defaultdict[Pin, list[str]](list)
    for lock in sorted(_LOCKS.glob("*.txt")):
        for name, version in _PIN.findall(lock.read_text()):
            found[name.lower(), version].append(lock.name)
    return found


def _batches(pins: Sequence[Pin]) -> Iterator[list[Pin]]:
    """Parts in which no package is there twice, which pip-audit refuses."""
    left = sorted(pins)
    while left:
        part = list({name: (name, version) for name, version in reversed(left)}.values())[:_AT_ONCE]
        left = [pin for pin in left if pin not in part]
        yield sorted(part)


def _ask(pins: Sequence[Pin], osv_url: str) -> dict[Pin, list[str]]:
    """The advisories of the packages that have some. Raises _NoAnswer."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("".join(f"{name}=={version}\n" for name, version in pins))
        file.flush()
        command = [sys.executable, "-m", "pip_audit", "--requirement", file.name, "--no-deps", "--disable-pip"]
        options = ["--vulnerability-service", "osv", "--format", "json", "--progress-spinner", "off"]
        address = ["--osv-url", osv_url] if osv_url else []
        run = subprocess.run([*command, *options, *address], capture_output=True, text=True, check=False)
    try:
        answered = {
            (one["name"].lower(), one["version"]): one["vulns"] for one in json.loads(run.stdout)["dependencies"]
        }
    except (ValueError, KeyError):
        raise _NoAnswer((run.stderr.strip() or "it said nothing").splitlines()[-1]) from None
    if missing := set(pins) - answered.keys():
        raise _NoAnswer(f"no answer for {', '.join(name for name, _ in missing)}")
    return {pin: [one["id"] for one in advisories] for pin, advisories in answered.items() if advisories}


def main() -> None:
    """Asks for every package of the locks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--osv-url", default="", metavar="URL", help="an index that speaks OSV's API (default: OSV)")
    parser.add_argument("--required", action="store_true", help="fail where something was not checked")
    options = parser.parse_args()
    if not importlib.util.find_spec("pip_audit"):
        sys.exit("pip-audit is not installed; run: make setup")
    pins, found, unchecked, reason = _pins(), dict[Pin, list[str]](), list[Pin](), ""
    try:
        if not _ask([_VULNERABLE], options.osv_url):
            raise _NoAnswer(f"it knows no advisory for {_VULNERABLE[0]} {_VULNERABLE[1]}, which has some")
    except _NoAnswer as error:
        unchecked, reason = list(pins), str(error)
    else:
        for part in _batches(list(pins)):
            try:
                found |= _ask(part, options.osv_url)
            except _NoAnswer as error:
                unchecked, reason = unchecked + part, str(error)
    for (name, version), advisories in sorted(found.items()):
        print(f"VULNERABLE: {name} {version} ({', '.join(pins[name, version])}): {', '.join(advisories)}")
    if unchecked:
        names = "" if len(unchecked) == len(pins) else f": {', '.join(name for name, _ in unchecked)}"
        print(
            f"SKIPPED: {len(unchecked)} of {len(pins)} packages of docker/requirements were not checked for known "
            f"vulnerabilities{names}; the index of advisories does not answer: {reason}"
        )
    print(f"{len(pins) - len(unchecked)} of {len(pins)} packages checked, {len(found)} with known vulnerabilities")
    sys.exit(_FOUND if found else _NOT_CHECKED if unchecked and options.required else 0)


if __name__ == "__main__":
    main()
