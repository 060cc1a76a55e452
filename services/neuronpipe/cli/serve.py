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

from neuronpipe.cli.terminal import CommandParser, option
from neuronpipe.core.errors import RefusedBundle, SetupError

if TYPE_CHECKING:
    from neuronpipe.core.metrics import Telemetry
    from neuronpipe.platform.process.settings import ProcessSettings
    from neuronpipe.platform.tls import ServerTls

HELP = "run one service, or all of them in one process"
EXTRA = "server"

# service → its package (`run` is in server.py), the class of its settings in settings.py, and the extra that installs
# its dependencies
SERVICES = {
    "all": ("neuronpipe.serve", "AllSettings", "all"),
    "gateway": ("neuronpipe.serve", "PipelineProcessSettings", "gateway"),
    "tokenizer": ("neuronpipe.stages", "TokenizerSettings", "tokenizer"),
    "neuron-executor": ("neuronpipe.stages", "NeuronExecutorSettings", "executor-openvino"),
    "postprocessor": ("neuronpipe.stages", "PostprocessorSettings", "postprocessor"),
    "worker": ("neuronpipe.bulk.jobs", "WorkerSettings", "worker"),
}
# The package of a stage that a gateway has in its process, and the extra that installs it. Back ends name their own.
_STAGE_EXTRAS = {"PIL": "tokenizer", "tokenizers": "tokenizer"}
# service → the options that matter first, which --help shows
_ALL = ("repository", "listen")
_LAST = ("metrics_listen", "tls_certificate", "tls_key", "grace_s")
_GATEWAY = ("http_listen", "api_keys", "insecure_public", "max_requests_in_flight")
_TARGETS = ("tokenizer_target", "executor_target", "postprocessor_target")
_STAGE = (*_ALL, *_LAST, "tls_client_ca", "allowed_peers", "trusted_keys")
_FIRST = {
    "all": (*_ALL, *_GATEWAY, "backend", "cores", *_LAST),
    "gateway": (*_ALL, *_GATEWAY, *_TARGETS, *_LAST[:-1]),
    "tokenizer": (*_STAGE, "redis_url", "token_cache_bytes"),
    "neuron-executor": (*_STAGE, "backend", "cores", "max_model_memory_bytes"),
    "postprocessor": _STAGE,
    "worker": ("listen", "target", "jobs_redis_url", "jobs_secret", "max_jobs", "max_requests_in_flight", *_LAST),
}
# kind of value in the help → how names of such settings end
_METAVARS: Mapping[str, str | tuple[str, ...]] = {
    "SIZE": "_bytes",
    "TIME": ("_s", "_ms"),
    "URL": "_url",
    "HOST:PORT": ("listen", "target"),
    "DIR": ("repository", "repository_cache"),
    "FILE": ("_key", "_keys", "_certificate", "_ca", "_crl", "_secret", "jwks", "tenants"),
}
# For so long a thread keeps the interpreter while others want it. Python's 5 ms, several times a request, would be what
# an answer takes while a thread reads a large body or writes metrics.
_SWITCH_S = 0.0005


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
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

            settings = read_arguments(options.service, options.settings)
            start_logging(options.service)
            if "cores" in type(settings).model_fields:
                os.environ.update(runtime_environment(getattr(settings, "cores"), os.environ))  # noqa: B009 (of two of the five kinds)
            if isinstance(settings, ServerSettings):
                check_folder(settings)
            serving = importlib.import_module(f"{package}.server").run
        run_service(options.service, settings, partial(serving, settings), os.environ)
    except ModuleNotFoundError as error:
        if options.service == "gateway":
            options.extra = _STAGE_EXTRAS.get(str(error.name), options.extra)
        raise


@contextmanager
def _importing() -> Iterator[None]:
    """Of the CPU time until a service listens, garbage collections while modules are imported took 0.1 s of 0.5 s, and
    pydantic's search for plug-ins in all installed packages 0.05 s (2026-11-23). What was imported is never garbage.
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
    settings: "ProcessSettings",
    serving: "Callable[[Telemetry, ServerTls | None], Coroutine[Any, Any, None]]",
    variables: MutableMapping[str, str],
) -> None:
    """Runs a service with its telemetry and TLS, for which `variables` are read, until it ends. Raises SetupError and
    ModuleNotFoundError; another error is logged and ends the process with the exit code 1.
    """
    from neuronpipe.core.logs import log_fault, log_warning
    from neuronpipe.platform.telemetry.start import running_telemetry
    from neuronpipe.platform.tls import running_server_tls

    # The thread pool of the library `tokenizers` costs a tenth of the throughput (docs/decisions/0002).
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.setswitchinterval(_SWITCH_S)
    try:
        with (
            running_server_tls(settings.tls_files) as tls,
            running_telemetry(service, settings, variables, tls) as telemetry,
            asyncio.Runner(loop_factory=event_loop) as runner,
        ):
            runner.run(serving(telemetry, tls))
    except RefusedBundle as refused:
        log_warning("a bundle is refused", problem=str(refused))
        raise
    except (SetupError, ModuleNotFoundError):
        raise
    except Exception as fault:
        log_fault("the service crashed", fault)
        sys.exit(1)


def settings_of(service: str) -> "type[ProcessSettings]":
    """The class of a service's settings."""
    package, name, _ = SERVICES[service]
    kind: type[ProcessSettings] = getattr(importlib.import_module(f"{package}.settings"), name)
    return kind


def settings_parser(service: str, *, shows_all: bool = True) -> CommandParser:
    """The parser of the arguments behind `neuronpipe serve SERVICE`. Its help has the first options, or all, each below
    the docstring of the class that declares it.
    """
    from neuronpipe.core.settings import Settings, option_name, variable_name

    kind = settings_of(service)
    about = f"{kind.__doc__} Each option is also a variable. Times and sizes take units: 250ms, 10m, 256MiB."
    parser = CommandParser(prog=f"neuronpipe serve {service}", usage="%(prog)s [options]", description=about)
    parser.add_argument("--help-all", action="help", help="show all options, by topic, and exit")
    groups = {"": parser.add_argument_group("first options")}
    classes = [one for one in reversed(kind.__mro__) if issubclass(one, Settings)]
    for name in dict.fromkeys([*_FIRST[service], *kind.model_fields]):
        field = kind.model_fields[name]
        title = ""
        if name not in _FIRST[service]:
            declaring = next(one for one in classes if name in one.__annotations__)
            title = str(declaring.__doc__).partition(".")[0]
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
    """The kind of a setting's value."""
    return next((kind for kind, ends in _METAVARS.items() if name.endswith(ends)), "VALUE")


def read_arguments(service: str, arguments: Sequence[str]) -> "ProcessSettings":
    """The settings that the arguments behind `neuronpipe serve SERVICE`, and the environment, give.
    Raises SetupError."""
    from neuronpipe.core.settings import read_settings

    kind = settings_of(service)
    given = vars(settings_parser(service, shows_all="--help-all" in arguments).parse_args(arguments))
    _check_required(kind, given)
    return read_settings(kind, given)


def _check_required(kind: "type[ProcessSettings]", given: Mapping[str, str]) -> None:
    """Raises SetupError for a required setting that is neither on the command line nor in the environment."""
    from neuronpipe.core.settings import option_name, variable_name

    in_environment = {name.upper() for name, value in os.environ.items() if value}
    for name, field in kind.model_fields.items():
        if field.is_required() and name not in given and variable_name(kind, name) not in in_environment:
            variable = variable_name(kind, name)
            raise SetupError(f"{option_name(name)} is required (variable: {variable}): {field.description}")


def event_loop() -> asyncio.AbstractEventLoop:
    """A new event loop of uvloop's."""
    import uvloop

    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop
