"""What stands in for the commands of console blocks:
`python -m tests.documentation.snippet_commands PROGRAM [ARGUMENT…]`.

It runs what is cheap. It checks the rest as far as it can, where IS_MARKED is 1: the block says why it is not run. It
ends with an error where a command is wrong.
"""

import importlib.util
import itertools
import os
import re
import runpy
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import grpc
from google.protobuf import json_format
from google.protobuf.descriptor_pool import Default
from google.protobuf.message_factory import GetMessageClass

from demo.processes import ServiceProcess
from neuronpipe.api.tei.v1 import tei_pb2
from neuronpipe.api.v1 import inference_pb2, models_pb2, traces_pb2
from neuronpipe.cli import main, make_parser
from neuronpipe.cli.serve import read_arguments
from neuronpipe.core.errors import SetupError
from neuronpipe.platform.process.settings import ServerSettings
from tests.documentation.pages import ROOT

# These run as they are. The load generator runs for a moment.
_RUN: Mapping[str, Sequence[str]] = {
    "bundle": (),
    "health": (),
    "infer": (),
    "key": (),
    "load": ("--duration", "0.3", "--warm-up", "0"),
    "models": (),
    "trace": (),
}
# Their arguments that need what the pages' gateway has not: TLS, a model that generates, a bucket.
_PARSED_ONLY = {"--tls-ca", "--generate", "push", "gc"}
# By importing them, Default() knows their services.
_PUBLIC = (inference_pb2, models_pb2, traces_pb2, tei_pb2)


def neuronpipe(arguments: Sequence[str]) -> None:
    """Runs commands that ask a gateway, and `serve` until it is ready. Parses the others with their parsers."""
    if (added := _RUN.get(arguments[0])) is not None and _PARSED_ONLY.isdisjoint(arguments):
        main([*arguments, *added])
        return
    options = make_parser().parse_args(arguments)
    if options.command != "serve" or not _serve(options.service, options.settings):
        _allow_unless_run(f"neuronpipe {options.command}")


def _allow_unless_run(command: str) -> None:
    """Ends the process where the block does not say why the command is not run."""
    if os.environ.get("IS_MARKED") != "1":
        sys.exit(f"{command} is not run; put <!-- not run here: REASON --> before the block")


def _serve(service: str, arguments: Sequence[str]) -> bool:
    """Reads the settings. Where there is a repository, starts the service, on free ports, and ends it. Says whether."""
    try:
        settings = read_arguments(service, arguments)
    except SetupError as error:
        sys.exit(str(error))
    if not (isinstance(settings, ServerSettings) and Path(settings.models.repository).is_dir()):
        return False
    pairs = zip(["", *arguments], arguments, strict=False)
    options = ["127.0.0.1:0" if before.endswith("listen") else argument for before, argument in pairs]
    with ServiceProcess(service, *options) as process:
        process.wait_until_ready()
    return True


def make(arguments: Sequence[str]) -> None:
    """Looks for the targets and variables in the Makefile."""
    text = "\n".join((ROOT / file).read_text(encoding="utf-8") for file in ("Makefile", "docker/docker.mk"))
    for argument in arguments:
        name, is_variable, _ = argument.partition("=")
        pattern = rf"\b{name}\b" if is_variable else rf"^([\w-]+ )*{re.escape(name)}( [\w-]+)*:(?!=)"
        if not re.search(pattern, text, re.MULTILINE):
            sys.exit(f"make: there is no {'variable' if is_variable else 'target'} {name}")
    _allow_unless_run("make")


def pip(arguments: Sequence[str]) -> None:
    """Looks for the extras of neuronpipe in pyproject.toml."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for argument in arguments:
        found = re.match(r"(?:\.|neuronpipe)\[(.+)\]", argument)
        for extra in found[1].split(",") if found else ():
            if extra not in extras:
                sys.exit(f"pip: {argument}: there is no extra {extra}")
    _allow_unless_run("pip")


def git(arguments: Sequence[str]) -> None:
    """Makes the folder of a clone, which stays empty."""
    if arguments[0] == "clone":
        Path(arguments[-1]).mkdir()
    _allow_unless_run("git")


def python(arguments: Sequence[str]) -> None:
    """Runs `python -m neuronpipe.api.protos`, makes an environment that is empty, looks for other modules and files."""
    match arguments:
        case ["-m", "neuronpipe.api.protos", *options]:
            sys.argv = ["neuronpipe.api.protos", *options]
            runpy.run_module("neuronpipe.api.protos", run_name="__main__")
        case ["-m", "venv", folder]:
            Path(folder, "bin").mkdir(parents=True, exist_ok=True)
            Path(folder, "bin", "activate").touch()
        case ["-m", module, *_] if importlib.util.find_spec(module):
            _allow_unless_run(f"python -m {module}")
        case [file, *_] if (ROOT / file).is_file():
            _allow_unless_run(f"python {file}")
        case _:
            sys.exit(f"python: there is no {' '.join(arguments[:2])}")


def pytest(arguments: Sequence[str]) -> None:
    """Looks for the files."""
    for argument in arguments:
        if argument.startswith("tests") and not (ROOT / argument.partition("::")[0]).exists():
            sys.exit(f"pytest: there is no {argument}")
    _allow_unless_run("pytest")


def grpcurl(arguments: Sequence[str]) -> None:
    """Makes the call, as `grpcurl -plaintext [-H 'NAME: VALUE'] [-d JSON] HOST:PORT SERVICE/METHOD` does."""
    *options, target, path = arguments
    fields = [value.partition(": ") for flag, value in itertools.pairwise(options) if flag == "-H"]
    method = Default().FindMethodByName(path.replace("/", "."))
    sent, answer = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
    request = json_format.Parse(options[options.index("-d") + 1] if "-d" in options else "{}", sent())
    with grpc.insecure_channel(target) as channel:
        call = channel.unary_unary(f"/{path}", sent.SerializeToString, answer.FromString)
        metadata = tuple((name, value) for name, _, value in fields)
        print(json_format.MessageToJson(call(request, timeout=10, metadata=metadata)))


PROGRAMS: Mapping[str, Callable[[Sequence[str]], None]] = {
    "git": git,
    "grpcurl": grpcurl,
    "make": make,
    "neuronpipe": neuronpipe,
    "pip": pip,
    "pytest": pytest,
    "python": python,
    "python3": python,
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](sys.argv[2:])
