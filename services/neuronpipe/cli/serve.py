"""`neuronpipe serve`: reads a service's settings and runs it."""

import argparse
import asyncio
import gc
import importlib
import os
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from neuronpipe.cli.terminal import CommandParser, explain, option
from neuronpipe.core.errors import RefusedBundle, SetupError
from neuronpipe.core.names import EXECUTOR, POSTPROCESSOR, TOKENIZER

if TYPE_CHECKING:
    from neuronpipe.core.metrics import Telemetry
    from neuronpipe.platform.process.settings import ServiceSettings
    from neuronpipe.platform.tls import ServerTls

HELP = "run one service, or all of them in one process"
EXTRA = "server"

# service → its package (`run` is in server.py), the class of its settings in settings.py, the extra it needs
SERVICES = {
    "all": ("neuronpipe.serve", "AllSettings", "all"),
    "gateway": ("neuronpipe.serve", "PipelineProcessSettings", "gateway"),
    TOKENIZER: ("neuronpipe.stages", "TokenizerSettings", "tokenizer"),
    EXECUTOR: ("neuronpipe.stages", "NeuronExecutorSettings", "executor-openvino"),
    POSTPROCESSOR: ("neuronpipe.stages", "PostprocessorSettings", "postprocessor"),
    "worker": ("neuronpipe.bulk.jobs", "WorkerSettings", "worker"),
}
# The package of a stage in a gateway's process, and the extra that installs it. Back ends name their own extras.
_STAGE_EXTRAS = {"PIL": "tokenizer", "tokenizers": "tokenizer"}
# service → the most important options, which --help shows
_ALL = ("repository", "listen")
_LAST = ("metrics_listen", "tls_certificate", "tls_key", "grace_s")
_GATEWAY = ("http_listen", "api_keys", "insecure_public", "max_requests_in_flight")
_TARGETS = ("tokenizer_target", "executor_target", "postprocessor_target")
_STAGE = (*_ALL, *_LAST, "tls_client_ca", "allowed_peers", "trusted_keys")
_FIRST = {
    "all": (*_ALL, *_GATEWAY, "backend", "cores", *_LAST),
    "gateway": (*_ALL, *_GATEWAY, *_TARGETS, *_LAST[:-1]),
    TOKENIZER: (*_STAGE, "redis_url", "token_cache_bytes"),
    EXECUTOR: (*_STAGE, "backend", "cores", "max_model_memory_bytes"),
    POSTPROCESSOR: _STAGE,
    "worker": ("listen", "target", "jobs_redis_url", "jobs_secret", "max_jobs", "max_requests_in_flight", *_LAST),
}
# kind of value in the help → the ends of the names of such settings
_METAVARS: Mapping[str, str | tuple[str, ...]] = {
    "SIZE": "_bytes",
    "TIME": ("_s", "_ms"),
    "URL": "_url",
    "HOST:PORT": ("listen", "target"),
    "DIR": ("repository", "repository_cache"),
    "FILE": ("_key", "_keys", "_certificate", "_ca", "_crl", "_secret", "jwks", "tenants"),
}
# The time for which a thread keeps the interpreter while others want it. Python's 5 ms, several times per request,
# would be the latency of an answer while a thread reads a large body or writes metrics.
_SWITCH_S = 0.0005


def add_options(parser: argparse.ArgumentParser) -> None:
    option(parser, "service SERVICE", ", ".join(SERVICES), choices=SERVICES)
    option(parser, "settings ...", "see `neuronpipe serve SERVICE --help`", nargs=argparse.REMAINDER)


def run(options: argparse.Namespace) -> None:
    """Serves until SIGTERM. Raises SetupError; a crash ends the process with the exit code 1."""
    package, _, options.extra = SERVICES[options.service]
    try:
        with _importing():
            from neuronpipe.bundles.sources import check_folder
            from neuronpipe.core.logs import start_logging
            from neuronpipe.platform.process.settings import ServerSettings
            from neuronpipe.stages.neuron_executor.runtimes.neuron import runtime_environment
            from neuronpipe.stages.settings import EngineSettings

            settings = read_arguments(options.service, options.settings)
            start_logging(options.service, os.environ.get("NEURONPIPE_LOG", ""))
            if isinstance(executor := getattr(settings, "executor", None), EngineSettings):
                os.environ.update(runtime_environment(executor.cores, os.environ))
            if isinstance(settings, ServerSettings):
                check_folder(settings.models)
            serving = importlib.import_module(f"{package}.server").run
        run_service(options.service, settings, partial(serving, settings), os.environ)
    except ModuleNotFoundError as error:
        if options.service == "gateway":
            options.extra = _STAGE_EXTRAS.get(str(error.name), options.extra)
        raise


@contextmanager
def _importing() -> Iterator[None]:
    """Speeds up imports: no garbage collections, and no plug-ins of pydantic.

    A service takes 0.5 s of CPU time until it listens (2026-11-23). Garbage collections took 0.1 s of it, pydantic's
    search for plug-ins in all installed packages 0.05 s. Imported objects are never garbage.
    """
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


def run_service(
    service: str,
    settings: "ServiceSettings",
    serving: "Callable[[Telemetry, ServerTls | None], Coroutine[Any, Any, None]]",
    variables: MutableMapping[str, str],
) -> None:
    """Runs a service with its telemetry and TLS, and ends the process: with the exit code 2 for a wrong setup, and 1
    after a crash.

    `variables`: the environment of telemetry. SetupError and ModuleNotFoundError are raised before that. The end waits
    for no thread, because a thread may load a model for minutes, or hang in a device.
    """
    from neuronpipe.platform.telemetry.start import running_telemetry
    from neuronpipe.platform.tls import running_server_tls

    # The thread pool of the library `tokenizers` costs a tenth of the throughput (docs/decisions/0002).
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.setswitchinterval(_SWITCH_S)
    with (
        running_server_tls(settings.tls.files) as tls,
        running_telemetry(service, settings.process, variables, tls) as telemetry,
    ):
        runner = asyncio.Runner(loop_factory=event_loop)  # closing it would wait for threads
        code = _exit_code(runner, serving(telemetry, tls))
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    os._exit(code)


def _exit_code(runner: asyncio.Runner, serving: "Coroutine[Any, Any, None]") -> int:
    """Runs a service to its end, and returns the exit code. Raises ModuleNotFoundError."""
    from neuronpipe.core.logs import log_fault, log_warning

    try:
        runner.run(serving)
    except SetupError as error:
        if isinstance(error, RefusedBundle):
            log_warning("a bundle is refused", problem=str(error))
        print(f"neuronpipe: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError:
        raise
    except Exception as fault:
        log_fault("the service crashed", fault)
        return 1
    return 0


def settings_of(service: str) -> "type[ServiceSettings]":
    package, name, _ = SERVICES[service]
    kind: type[ServiceSettings] = getattr(importlib.import_module(f"{package}.settings"), name)
    return kind


def settings_parser(service: str, *, shows_all: bool = True, command: str = "serve") -> CommandParser:
    """Returns the parser of the arguments of `neuronpipe serve SERVICE`, or of another command with its settings.

    The help has the first options, or all, each below the docstring of the class that declares it.
    """
    from neuronpipe.core.settings import declared_in, option_name, variable_name

    kind = settings_of(service)
    about = f"{kind.__doc__} Each option is also a variable. Times and sizes take units: 250ms, 10m, 256MiB."
    parser = CommandParser(prog=f"neuronpipe {command} {service}", usage="%(prog)s [options]")
    explain(parser, about.removesuffix("."))
    parser.add_argument("--help-all", action="help", help="show all options, by topic, and exit")
    groups = {"": parser.add_argument_group("first options")}
    declared = {name: (str(part.__doc__), field) for part, name, field in declared_in(kind)}
    for name in dict.fromkeys([*_FIRST[service], *declared]):
        topic, field = declared[name]
        title = "" if name in _FIRST[service] else topic.partition(".")[0]
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        group = groups[title]
        has_default = str(field.default) not in ("", "None", "False")
        default = "required; " if field.is_required() else f"default: {field.default}; " if has_default else ""
        text = f"{field.description} ({default}{variable_name(kind, name)})".replace("%", "%%")
        shown = text if shows_all or not title else argparse.SUPPRESS
        if field.annotation is bool:
            group.add_argument(option_name(name), default=argparse.SUPPRESS, action="store_true", help=shown)
        else:
            group.add_argument(option_name(name), default=argparse.SUPPRESS, metavar=_metavar(name), help=shown)
    return parser


def _metavar(name: str) -> str:
    return next((kind for kind, ends in _METAVARS.items() if name.endswith(ends)), "VALUE")


def read_arguments(service: str, arguments: Sequence[str], command: str = "serve") -> "ServiceSettings":
    """Reads the settings of a service from the arguments of `neuronpipe COMMAND SERVICE`, and the environment.

    Raises SetupError.
    """
    from neuronpipe.core.settings import read_settings

    kind = settings_of(service)
    parser = settings_parser(service, shows_all="--help-all" in arguments, command=command)
    given_settings = vars(parser.parse_args(arguments))
    _check_required(kind, given_settings)
    return read_settings(kind, given_settings)


def _check_required(kind: "type[ServiceSettings]", arguments: Mapping[str, str]) -> None:
    """Raises SetupError if a required setting is neither on the command line nor in the environment."""
    from neuronpipe.core.settings import fields_of, option_name, variable_name

    in_environment = {name.upper() for name, value in os.environ.items() if value}
    for name, field in fields_of(kind).items():
        if field.is_required() and name not in arguments and variable_name(kind, name) not in in_environment:
            variable = variable_name(kind, name)
            raise SetupError(f"{option_name(name)} is required (variable: {variable}): {field.description}")


def event_loop() -> asyncio.AbstractEventLoop:
    import uvloop

    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop
