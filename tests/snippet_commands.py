"""What stands in for the commands of console blocks: `python -m tests.snippet_commands PROGRAM [ARGUMENT…]`.

It runs what is cheap, checks the rest as far as it can, and ends with an error where a command is wrong.
"""

import importlib.util
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
from neuronpipe.api.v1 import inference_pb2, models_pb2, traces_pb2
from neuronpipe.cli import main, make_parser
from neuronpipe.cli.serve import read_arguments
from neuronpipe.core.errors import SetupError
from tests.pages import ROOT

# These run as they are. The load generator runs for a moment.
_RUN: Mapping[str, Sequence[str]] = {
    "health": (),
    "infer": (),
    "load": ("--duration", "0.3", "--warm-up", "0"),
    "models": (),
    "trace": (),
}
# By importing them, Default() knows their services.
_PUBLIC = (inference_pb2, models_pb2, traces_pb2)


def neuronpipe(arguments: Sequence[str]) -> None:
    """Runs commands that ask a gateway, and `serve` until it is ready. Parses the others with their parsers."""
    if (added := _RUN.get(arguments[0])) is not None:
        main([*arguments, *added])
        return
    options = make_parser().parse_args(arguments)
    if options.command == "serve":
        _serve(options.service, options.settings)


def _serve(service: str, arguments: Sequence[str]) -> None:
    """Reads the settings. Where there is a repository, starts the service, on free ports, and ends it."""
    try:
        settings = read_arguments(service, arguments)
    except SetupError as error:
        sys.exit(str(error))
    if settings.repository.is_dir():
        before = ["", *arguments]
        options = ["127.0.0.1:0" if option.endswith("listen") else one for option, one in zip(before, arguments, strict=False)]
        with ServiceProcess(service, *options) as process:
            process.wait_until_ready()


def make(arguments: Sequence[str]) -> None:
    """Looks for the targets and variables in the Makefile."""
    text = "\n".join((ROOT / file).read_text(encoding="utf-8") for file in ("Makefile", "docker/docker.mk"))
    for argument in arguments:
        name, is_variable, _ = argument.partition("=")
        pattern = rf"\b{name}\b" if is_variable else rf"^([\w-]+ )*{re.escape(name)}( [\w-]+)*:(?!=)"
        if not re.search(pattern, text, re.MULTILINE):
            sys.exit(f"make: there is no {'variable' if is_variable else 'target'} {name}")


def pip(arguments: Sequence[str]) -> None:
    """Looks for the extras of neuronpipe in pyproject.toml."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for argument in arguments:
        found = re.match(r"(?:\.|neuronpipe)\[(.+)\]", argument)
        for extra in found[1].split(",") if found else ():
            if extra not in extras:
                sys.exit(f"pip: {argument}: there is no extra {extra}")


def python(arguments: Sequence[str]) -> None:
    """Looks for the module or the file. Runs `python -m neuronpipe.protos`; makes an environment that is empty."""
    if arguments[:1] != ["-m"]:
        if not arguments or not (ROOT / arguments[0]).is_file():
            sys.exit(f"python: there is no {arguments[:1]}")
        return
    if arguments[1] == "neuronpipe.protos":
        sys.argv = [arguments[1], *arguments[2:]]
        runpy.run_module(arguments[1], run_name="__main__")
    elif arguments[1] == "venv":
        Path(arguments[2], "bin").mkdir(parents=True, exist_ok=True)
        Path(arguments[2], "bin", "activate").touch()
    elif importlib.util.find_spec(arguments[1]) is None:
        sys.exit(f"python: there is no module {arguments[1]}")


def pytest(arguments: Sequence[str]) -> None:
    """Looks for the files."""
    for argument in arguments:
        if argument.startswith("tests") and not (ROOT / argument.partition("::")[0]).exists():
            sys.exit(f"pytest: there is no {argument}")


def grpcurl(arguments: Sequence[str]) -> None:
    """Makes the call, as `grpcurl -plaintext [-d JSON] HOST:PORT SERVICE/METHOD` does."""
    *options, target, path = arguments
    method = Default().FindMethodByName(path.replace("/", "."))
    sent, answer = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
    request = json_format.Parse(options[options.index("-d") + 1] if "-d" in options else "{}", sent())
    with grpc.insecure_channel(target) as channel:
        call = channel.unary_unary(f"/{path}", sent.SerializeToString, answer.FromString)
        print(json_format.MessageToJson(call(request, timeout=10)))


PROGRAMS: Mapping[str, Callable[[Sequence[str]], None]] = {
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
