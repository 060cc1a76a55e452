"""The command line. A file here, with the command's name (_ for -), defines each command.

A file has HELP, EXTRA, `add_options(parser)` and `run(options)`, or subcommands with their own `run`. EXTRA: the extra
of pyproject.toml that installs the command's dependencies; "" for none. A command imports its dependencies when it
runs: `infer` must work where only the client is installed.
"""

import argparse
import errno
import importlib
import os
import re
import signal
import sys
from collections.abc import Sequence

from neuronpipe import __version__
from neuronpipe.cli import serve
from neuronpipe.cli.terminal import CommandParser, add_command
from neuronpipe.core.addresses import is_reachable
from neuronpipe.core.errors import NeuronpipeError, SetupError, Unavailable

_GROUPS = {
    "build": ("compile", "bundle", "registry", "accept"),
    "serve": ("run", "serve", "key", "cache"),
    "call": ("infer", "generate", "job", "transform", "models"),
    "operate": ("health", "trace", "load", "benchmark"),
    "deploy": ("deploy", "undeploy", "check-deployment"),
    "shell": ("completion",),
}
# Errors of a write to standard output, or to an open file.
_OF_OUTPUT = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
COMMANDS = tuple(name for names in _GROUPS.values() for name in names)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command. Exit codes: 0 done, 1 the request failed, 2 the command, a setting, file or bundle is wrong.

    If the reader of the output has left, as with `| head`, the command ends silently with the code of SIGPIPE.
    """
    try:
        try:
            _run(arguments)
        finally:
            if sys.stdout:  # None if it was closed
                sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        if not error.filename and error.errno not in _OF_OUTPUT:
            raise
        if not error.filename and sys.stdout:  # Python would try to write the rest at its end, and complain
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            sys.exit(128 + signal.SIGPIPE)
        denied = f"permission denied for user {os.geteuid()}"
        problem = denied if isinstance(error, PermissionError) else error.strerror
        _exit(f"{error.filename or 'the output'}: {problem}", 2)


def _run(arguments: Sequence[str] | None) -> None:
    if "_ARGCOMPLETE" in os.environ:
        _complete(os.environ.get("COMP_LINE", "").split())
    options = _parse(sys.argv[1:] if arguments is None else arguments)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if getattr(options, "api_key_file", None):
            from neuronpipe.cli.request import use_key_of

            use_key_of(options.api_key_file)
        options.run(options)
    except SetupError as error:
        _exit(_unreachable(error.__cause__, options) or str(error), 2)
    except NeuronpipeError as error:
        _exit(_unreachable(error, options) or f"{error.reason}: {error.message}", 1)
    except ModuleNotFoundError as error:
        if error.name and error.name.partition(".")[0] == "neuronpipe":
            raise
        wanted = f"'neuronpipe[{options.extra}]'" if options.extra else "neuronpipe"
        _exit(f"{options.command} needs the package {error.name}, which is not installed: pip install {wanted}", 2)


def _unreachable(error: BaseException | None, options: argparse.Namespace) -> str:
    """Returns the message if a command found no gRPC server at its target; empty if there may be a server."""
    if not isinstance(error, Unavailable):
        return ""
    target = getattr(options, "target", "")
    if "http1.x server" in error.message:  # gRPC's core says so
        return f"UNAVAILABLE: --target {target} speaks HTTP/1.1; give the port of gRPC, 50050 unless --listen names one"
    if is_reachable(target):
        return ""
    return f"UNAVAILABLE: nothing listens at --target {target}; is `neuronpipe serve` running there?"


def _complete(line: Sequence[str]) -> None:
    """Answers a shell that runs the script of `neuronpipe completion`, and ends the process."""
    import argcomplete

    parser = make_parser()
    if line[1:2] == ["serve"] and {*line[2:3]} & serve.SERVICES.keys():
        # `serve` itself leaves the options of a service to the service's own parser.
        parser = CommandParser(prog="neuronpipe")
        services = parser.add_subparsers().add_parser("serve").add_subparsers()
        services.add_parser(line[2], parents=[serve.settings_parser(line[2])], add_help=False)
    argcomplete.autocomplete(parser)


def _exit(message: str, code: int) -> None:
    print(f"neuronpipe: {message}", file=sys.stderr)
    sys.exit(code)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = make_parser([arguments[0]] if arguments and arguments[0] in COMMANDS else COMMANDS)
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:  # Python represents bytes that are not UTF-8 as lone surrogates
            parser.error(f"argument {argument!r}: not valid UTF-8")
    return parser.parse_args(arguments)


class _GroupedParser(CommandParser):
    """Lists the commands by group."""

    def format_help(self) -> str:
        text = super().format_help()
        for group, names in _GROUPS.items():
            text = re.sub(rf"^    {names[0]} ", rf"  {group}:\n\g<0>", text, count=1, flags=re.MULTILINE)
        return text


def make_parser(with_options: Sequence[str] = COMMANDS) -> CommandParser:
    """Returns the parser of all commands. Only the commands `with_options` get their options."""
    first = "neuronpipe run MODEL compiles and serves a model; neuronpipe infer --model NAME --text TEXT calls it."
    parser = _GroupedParser(prog="neuronpipe", description="Compiles and serves Hugging Face models.", epilog=first)
    parser.add_argument("--version", action="version", version=f"neuronpipe {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name in COMMANDS:
        if name not in with_options:
            commands.add_parser(name)
            continue
        definition = importlib.import_module(f"neuronpipe.cli.{name.replace('-', '_')}")
        command_parser = add_command(commands, name, definition.HELP)
        definition.add_options(command_parser)
        run = getattr(definition, "run", None)  # otherwise each of its subcommands has a function
        command_parser.set_defaults(run=run, command=name, extra=definition.EXTRA)
    return parser


if __name__ == "__main__":
    main()
