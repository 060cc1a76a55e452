"""The command line. Reads settings, builds what a command needs and runs it.

What a command needs is imported by that command alone: `infer` must work where only the client is installed.
"""

import argparse
import asyncio
import contextlib
import errno
import importlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from neuronpipe import __version__, cache_command
from neuronpipe.acceptance import command as accept_command
from neuronpipe.bundles import command as compile_command
from neuronpipe.core.errors import NeuronpipeError, SetupError
from neuronpipe.load import command as load_command

if TYPE_CHECKING:
    from neuronpipe.api.v1.inference_pb2 import InferRequest

# service → (module with `run`, its settings)
_SERVICES = {
    "all": ("neuronpipe.local", "AllSettings"),
    "gateway": ("neuronpipe.gateway.server", "GatewaySettings"),
    "tokenizer": ("neuronpipe.tokenizer.server", "TokenizerSettings"),
    "neuron-executor": ("neuronpipe.neuron_executor.server", "NeuronExecutorSettings"),
    "postprocessor": ("neuronpipe.postprocessor.server", "PostprocessorSettings"),
}

# A day. Far larger numbers overflow in gRPC, which takes them for a deadline that has passed.
_MAX_TIMEOUT_S = 86_400


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command. Exit codes: 0 done, 1 the request failed, 2 the command, a setting or a bundle is at fault."""
    options = _parse(sys.argv[1:] if arguments is None else arguments)
    try:
        options.run(options)
    except SetupError as error:
        _exit(str(error), 2)
    except NeuronpipeError as error:
        _exit(f"{error.reason}: {error.message}", 1)
    except ModuleNotFoundError as error:
        _exit(f"this command needs the package {error.name}; install neuronpipe with the extra that {options.command!r} needs", 2)
    except KeyboardInterrupt:
        sys.exit(130)


def _exit(message: str, code: int) -> None:
    print(f"neuronpipe: {message}", file=sys.stderr)
    sys.exit(code)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _parser()
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:  # Python keeps bytes of the command line that are no UTF-8 as halves of characters
            parser.error(f"argument {argument!r}: not valid UTF-8")
    return parser.parse_args(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="neuronpipe", description="Transformers served over gRPC as a pipeline of services.")
    parser.add_argument("--version", action="version", version=f"neuronpipe {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    compile_ = commands.add_parser("compile", help="compile a Transformers model into a bundle")
    compile_.set_defaults(run=_compile, command="compile")
    compile_command.add_options(compile_)

    accept = commands.add_parser("accept", help="compile and measure models on this machine, into a report folder")
    accept.set_defaults(run=_accept, command="accept")
    accept_command.add_options(accept)

    serve = commands.add_parser("serve", help="run one service, or all of them in one process")
    serve.set_defaults(run=_serve, command="serve")
    serve.add_argument("service", choices=_SERVICES, metavar="SERVICE", help=", ".join(_SERVICES))
    serve.add_argument("settings", nargs=argparse.REMAINDER, metavar="...", help="see `neuronpipe serve SERVICE --help`")

    infer = commands.add_parser("infer", help="run one input and print the response as JSON")
    infer.set_defaults(run=_infer, command="infer")
    _add_target(infer)
    _add_request(infer)

    trace = commands.add_parser("trace", help="run one input and show where its time went; for servers with --kept-traces")
    trace.set_defaults(run=_trace, command="trace")
    _add_target(trace)
    _add_request(trace)
    trace.add_argument("--warm-up", type=int, default=3, metavar="N", help="requests sent before, which are not shown (default: 3)")
    trace.add_argument("--html", type=Path, metavar="FILE", help="write the waterfall as a page")
    trace.add_argument("--otlp", type=Path, metavar="FILE", help="write the spans as OTLP JSON, which Jaeger's page can load")

    models = commands.add_parser("models", help="list the models that a gateway serves")
    models.set_defaults(run=_models, command="models")
    _add_target(models)

    health = commands.add_parser("health", help="exit with 0 where a server is serving: for the health checks of containers")
    health.set_defaults(run=_health, command="health")
    health.add_argument("--target", required=True, type=_target, metavar="HOST:PORT", help="any of the services")
    health.add_argument(
        "--service", default="", metavar="S", help="one gRPC service of it by its full name (default: the server as a whole)"
    )
    health.add_argument("--timeout-s", type=_timeout_s, default=3.0, metavar="S", help="how long to wait, in seconds (default: 3)")

    load = commands.add_parser("load", help="send requests to a gateway and measure how it answers")
    load.set_defaults(run=load_command.run, command="load")
    load_command.add_options(load)

    cache = commands.add_parser("cache", help="look at, delete or fill what is cached in Redis")
    cache.set_defaults(run=cache_command.run, command="cache")
    cache_command.add_options(cache)
    return parser


def _add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", required=True, type=_target, metavar="HOST:PORT", help="the gateway")
    parser.add_argument(
        "--timeout-s", type=_timeout_s, default=30.0, metavar="S", help=f"deadline in seconds, at most {_MAX_TIMEOUT_S:,} (default: 30)"
    )


def _add_request(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="M", help="the model's name")
    parser.add_argument("--version", default="", metavar="V", help="the model's version (default: the newest)")
    input = parser.add_mutually_exclusive_group(required=True)
    input.add_argument("--json", metavar="INPUT", help="""a TaskInput, as '{"sentence_embedding": {"text": "…"}}'""")
    input.add_argument("--image", type=Path, metavar="FILE", help="a JPEG, PNG or WebP file to classify")


def _target(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("is empty")
    return text


def _timeout_s(text: str) -> float:
    try:
        timeout_s = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 < timeout_s <= _MAX_TIMEOUT_S:  # false for NaN too
        raise argparse.ArgumentTypeError(f"{text}: must be more than 0 and at most {_MAX_TIMEOUT_S:,}")
    return timeout_s


def _compile(options: argparse.Namespace) -> None:
    with _ending_on_sigterm():
        print(compile_command.compile_source(options))


def _accept(options: argparse.Namespace) -> None:
    with _ending_on_sigterm():
        accept_command.run(options)


@contextlib.contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """SIGTERM ends the block as an exception does, so that it cleans up, with the exit code that shells expect."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _serve(options: argparse.Namespace) -> None:
    from neuronpipe.core import config
    from neuronpipe.core.logs import log_fault, start_logging
    from neuronpipe.core.neuron import runtime_environment
    from neuronpipe.telemetry.start import running_telemetry

    module_name, settings_name = _SERVICES[options.service]
    kind: type[config.ServerSettings] = getattr(config, settings_name)
    parser = argparse.ArgumentParser(prog=f"neuronpipe serve {options.service}", description=kind.__doc__)
    for name, field in kind.model_fields.items():
        default = "required" if field.is_required() else f"default: {field.default!r}"
        text = f"{field.description} ({default}; {config.variable_name(kind, name)})".replace("%", "%%")
        parser.add_argument(f"--{name.replace('_', '-')}", default=argparse.SUPPRESS, metavar=name.upper(), help=text)
    settings = config.read_settings(kind, vars(parser.parse_args(options.settings)))
    start_logging(options.service)
    if "cores" in kind.model_fields:
        os.environ.update(runtime_environment(getattr(settings, "cores"), os.environ))  # noqa: B009 (of two of the five kinds)
    # Threads of the tokenizers' own cost more than they bring: a tenth of the throughput (docs/decisions/0002).
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        with running_telemetry(options.service, settings, os.environ) as telemetry, asyncio.Runner(loop_factory=_event_loop) as runner:
            runner.run(importlib.import_module(module_name).run(settings, telemetry))
    except (SetupError, ModuleNotFoundError):
        raise
    except Exception as fault:
        log_fault("the service crashed", fault)
        sys.exit(1)


def _event_loop() -> asyncio.AbstractEventLoop:
    import uvloop

    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def _infer(options: argparse.Namespace) -> None:
    from google.protobuf import json_format

    from neuronpipe.client import Client

    request = _request(options)
    with Client(options.target, timeout_s=options.timeout_s) as client:
        response = client.infer(request)
    print(json_format.MessageToJson(response, preserving_proto_field_name=True, ensure_ascii=False))


def _trace(options: argparse.Namespace) -> None:
    from neuronpipe.trace import command as trace_command

    trace_command.run(options, _request(options))


def _request(options: argparse.Namespace) -> "InferRequest":
    """The request that _add_request's options describe. Raises SetupError."""
    from google.protobuf import json_format

    from neuronpipe.api.v1.inference_pb2 import InferRequest
    from neuronpipe.api.v1.tasks_pb2 import ImageClassificationInput, TaskInput

    try:
        if options.image:
            input = TaskInput(image_classification=ImageClassificationInput(image=options.image.read_bytes()))
        else:
            input = json_format.Parse(options.json, TaskInput())
    except json_format.ParseError as error:
        raise SetupError(f"--json: is no TaskInput: {error}") from error
    except OSError as error:
        raise SetupError(f"--image {options.image}: cannot be read: {os.strerror(error.errno or errno.EIO)}") from error
    return InferRequest(model=options.model, version=options.version, input=input)


def _health(options: argparse.Namespace) -> None:
    from neuronpipe.rpc.health_check import check_health

    check_health(options.target, options.service, options.timeout_s)


def _models(options: argparse.Namespace) -> None:
    from neuronpipe.client import Client

    with Client(options.target, timeout_s=options.timeout_s) as client:
        models = client.list_models()
    print(f"{'MODEL':24} {'VERSION':>7} {'TASK':20} {'TOKENS':>6} {'BACK END':10} {'DTYPE':9} ARCHITECTURE")
    for model in models:
        version = model.version + ("*" if model.is_default else " ")
        backends = ",".join(model.backends)
        also = "".join(f", also {task}" for task in model.tasks if task != model.task)
        print(f"{model.name:24} {version:>7} {model.task:20} {model.max_tokens:6} {backends:10} {model.dtype:9} {model.architecture}{also}")


if __name__ == "__main__":
    main()
