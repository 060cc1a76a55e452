"""What each part needs installed: nothing that its extra in pyproject.toml does not name.

Each import runs in a fresh interpreter in which every other package looks as if it were not installed.
"""

import re
import subprocess
import sys
import tomllib
from functools import cache

import pytest

from tests.documentation.pages import ROOT

_BASE = {"grpc", "google", "numpy", "typing_extensions"}  # the last is a dependency of grpcio
_PYDANTIC = {"pydantic", "pydantic_core", "annotated_types", "typing_inspection"}
_SERVER = _BASE | _PYDANTIC | {"grpc_health", "grpc_reflection", "ngh2", "uvloop"}

_OTEL = {"opentelemetry", "prometheus_client", "requests", "urllib3", "certifi", "idna", "charset_normalizer"}

# module → the packages that may be there; what the extra of the same name installs.
_NEEDS = {
    "neuronpipe.cli": set(),
    "neuronpipe.core.errors": set(),
    "neuronpipe.client": _BASE,
    "neuronpipe.measure.load.run": _BASE,
    "neuronpipe.cli.trace": _BASE,
    "neuronpipe.serve.server": _SERVER,
    "neuronpipe.stages.server": _SERVER,
    "neuronpipe.stages.tokenizer.stage": _SERVER | {"tokenizers", "PIL", "jinja2", "markupsafe"},
    "neuronpipe.stages.neuron_executor.stage": _SERVER,
    "neuronpipe.stages.neuron_executor.backends.fake": _BASE | _PYDANTIC,
    "neuronpipe.stages.postprocessor.stage": _SERVER,
    "neuronpipe.rpc.client": _BASE,
    "neuronpipe.platform.telemetry.start": _PYDANTIC | _BASE,
    "neuronpipe.platform.telemetry.spans": _BASE | _OTEL,
    "neuronpipe.platform.telemetry.otlp_metrics": _BASE | _OTEL,
    "neuronpipe.platform.telemetry.prometheus": _BASE | _OTEL,
}
# What must stay out of serving processes for its size, whether it is installed or not.
_HEAVY = {
    "torch",
    "transformers",
    "tokenizers",
    "PIL",
    "jinja2",
    "markupsafe",
    "openvino",
    "huggingface_hub",
    "safetensors",
    "sentence_transformers",
    "opentelemetry",
    "prometheus_client",
}

_SERVERS = (
    "neuronpipe.bulk.jobs.server",
    "neuronpipe.serve.front",
    "neuronpipe.serve.server",
    "neuronpipe.stages.server",
    "neuronpipe.stages.neuron_executor.stage",
    "neuronpipe.stages.postprocessor.stage",
    "neuronpipe.stages.tokenizer.stage",
)

# Prints what was asked for, whether it was there or not.
_PROGRAM = """
import importlib, sys

allowed = {allowed!r} | {{"neuronpipe"}} | set(sys.stdlib_module_names)
platform_data = "_sysconfigdata"  # of the standard library, with the platform in its name
asked = set()

class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        asked.add(name)
        if name.partition(".")[0] not in allowed and not name.startswith(platform_data):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, NotInstalled())
importlib.import_module({module!r})
print(*asked)
"""
_COMMANDS = """
for command in ("health", "models", "infer --model m --json {}", "trace --model m --json {}"):
    try:
        importlib.import_module("neuronpipe.cli").main([*command.split(), "--target", "127.0.0.1:9"])
    except SystemExit as ended:
        print(ended.code, file=sys.stderr)
"""


def _python(program: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


@cache
def _asked_for_by(module: str) -> set[str]:
    """What a module asks for where only its extra is installed. Raises AssertionError where it needs more."""
    every = _SERVER | _OTEL | _HEAVY | {"redis", "httpx"}
    process = _python(_PROGRAM.format(module=module, allowed=_NEEDS.get(module, every)))
    assert process.returncode == 0, process.stderr
    return set(process.stdout.split())


@pytest.mark.parametrize("module", _NEEDS)
def test_a_part_needs_nothing_but_what_its_extra_installs_and_loads_no_library_that_another_needs(module: str) -> None:
    assert {name.partition(".")[0] for name in _asked_for_by(module)} & (_HEAVY - _NEEDS[module]) == set()


@pytest.mark.parametrize("module", _SERVERS)
def test_no_part_that_serves_loads_the_compiler(module: str) -> None:
    asked = _asked_for_by(module)
    assert module in asked
    assert [name for name in asked if name.startswith("neuronpipe.compiler")] == []


def test_commands_of_callers_run_where_only_the_client_is_installed() -> None:
    process = _python(_PROGRAM.format(module="neuronpipe.cli", allowed=_BASE) + _COMMANDS)
    # Nobody listens there; the exit code of a package that is missing is 2.
    lines = process.stderr.splitlines()
    assert [line.split(": ")[:2] for line in lines[::2]] == [["neuronpipe", "UNAVAILABLE"]] * 4, process.stderr
    assert lines[1::2] == ["1"] * 4


def test_a_package_that_a_part_needs_and_lacks_is_noticed() -> None:
    allowed = _SERVER | {"PIL", "jinja2", "markupsafe"}
    process = _python(_PROGRAM.format(module="neuronpipe.stages.tokenizer.stage", allowed=allowed))
    assert process.returncode == 1
    assert "No module named 'tokenizers'" in process.stderr


@pytest.mark.parametrize(("extra", "package"), [("server", "ngh2")])
def test_a_library_whose_insides_are_used_is_bounded_behind_the_tested_version(extra: str, package: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (bound,) = [found[1] for pin in extras[extra] if (found := re.fullmatch(rf"{package}>=[\d.]+,<0\.(\d+)", pin))]
    tested = re.search(rf"^{package}==0\.(\d+)\.", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert tested
    assert int(bound) == int(tested[1]) + 1
