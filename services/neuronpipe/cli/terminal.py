"""The shell side of commands: the parser, completion, values that stand for files, tables, signals."""

import argparse
import asyncio
import contextlib
import difflib
import inspect
import re
import signal
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeAlias, TypeVar

from neuronpipe.cli.examples import example_command
from neuronpipe.core.errors import SetupError
from neuronpipe.core.files import reporting_os_errors
from neuronpipe.core.removed_settings import why_removed
from neuronpipe.core.units import in_unit, words_of

KindT = TypeVar("KindT")

# argparse's message for an unknown choice.
_INVALID_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)")


class CommandParser(argparse.ArgumentParser):
    """Reports an error in two lines, and suggests the option or the command that was probably meant."""

    _arguments: Sequence[str] = ()

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parses as the base class does, but an argument that a command does not know is an error of this command."""
        self._arguments = sys.argv[1:] if args is None else args
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return options, unknown

    def error(self, message: str) -> NoReturn:
        if choice := _INVALID_CHOICE.search(message):
            near_choices = difflib.get_close_matches(choice[1], re.findall(r"'([^']*)'", choice[2]), 1)
            if near_choices:
                message = f"{message[: choice.start()]}invalid choice: {choice[1]!r}; did you mean {near_choices[0]}?"
        if "arguments are required: " in message:
            named = [
                action
                for action in self._actions
                if not action.option_strings and action.choices and f" {action.metavar}" in message
            ]
            message = message.removesuffix(", ...")
            message += "".join(
                f"; {action.metavar} is one of {', '.join(map(str, action.choices or ()))}" for action in named
            )
        options = list(self._option_string_actions)
        flags = {argument.partition("=")[0] for argument in self._arguments if argument.startswith("--")}
        removed = [f"{flag} {why}" for flag in sorted(flags.difference(options)) if (why := why_removed(flag))]
        if removed:
            message, flags = "; ".join(removed), set()
        misspelt = sorted(flag for flag in flags if not any(option.startswith(flag) for option in options))
        near = {flag: difflib.get_close_matches(flag, options, 1) for flag in misspelt}
        hints = "".join(f"; {flag}: did you mean {matches[0]}?" for flag, matches in near.items() if matches)
        self.exit(2, f"usage: {self.prog} [options]; see {self.prog} --help\n{self.prog}: error: {message}{hints}\n")


def option(
    place: "argparse._ActionsContainer", usage: str, text: str, value: Any = str, **settings: Any
) -> argparse.Action:
    """Adds an option, or an argument without a flag, to a parser or a group.

    - `usage`: its name, and the placeholder of its value, as `--rate R`; without a placeholder it is a switch.
    - `value`: its type, or its default, which determines the type.
    - `settings`: see argparse.
    """
    name, _, metavar = usage.partition(" ")
    if metavar:
        settings["metavar"] = metavar
    elif name.startswith("--") and not settings.keys() & {"action", "choices", "metavar"}:
        return place.add_argument(name, help=text, action="store_true", **settings)
    if callable(value):
        settings["type"] = value
    else:
        settings |= {"default": value, "type": Path if isinstance(value, Path) else type(value)}
    return place.add_argument(name, help=text, **settings)


def made(kind: type[KindT], options: argparse.Namespace, **others: Any) -> KindT:
    """Makes an object of a class. Its arguments are the options of the same names, and `others`."""
    arguments = {name: getattr(options, name) for name in inspect.signature(kind).parameters if hasattr(options, name)}
    return kind(**arguments | others)


def subcommand(
    commands: "argparse._SubParsersAction[Any]", name: str, run: Callable[[argparse.Namespace], None], text: str
) -> argparse.ArgumentParser:
    """Adds a command of a command, and the function that it runs."""
    added = add_command(commands, name, text)
    added.set_defaults(run=run)
    return added


def add_command(commands: "argparse._SubParsersAction[Any]", name: str, text: str) -> argparse.ArgumentParser:
    """Adds a command."""
    added: argparse.ArgumentParser = commands.add_parser(name, help=text)
    explain(added, text)
    return added


def explain(command: argparse.ArgumentParser, text: str) -> None:
    """Puts the purpose of a command at the start of its help, and an example at the end."""
    command.formatter_class = argparse.RawDescriptionHelpFormatter
    command.description = f"{text[0].upper()}{text[1:]}."
    command.epilog = f"example:\n  {example_command(command.prog)}"


def report(line: str) -> None:
    """Prints progress for people on standard error; standard output has results alone."""
    print(line, file=sys.stderr, flush=True)


def say(line: str) -> None:
    """Prints a message about the command, in the form of errors."""
    report(f"neuronpipe: {line}")


def seconds(text: str) -> float:
    """Reads an option in seconds, such as 30, 250ms or 10m."""
    return _in_unit(text, "s")


def milliseconds(text: str) -> float:
    """Reads an option in milliseconds, such as 250 or 2s."""
    return _in_unit(text, "ms")


def _in_unit(text: str, unit: str) -> float:
    try:
        return in_unit(text, unit)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def whole_numbers(text: str) -> tuple[int, ...]:
    """Reads an option that takes whole numbers with commas."""
    return _list_of(int, text)


def words(text: str) -> tuple[str, ...]:
    """Reads an option that takes words with commas."""
    return _list_of(str, text)


def _list_of(kind: Callable[[str], Any], text: str) -> tuple[Any, ...]:
    try:
        values = tuple(dict.fromkeys(map(kind, words_of(text))))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: must be whole numbers with commas") from None
    if not values:
        raise argparse.ArgumentTypeError("is empty")
    return values


def completed_by(action: argparse.Action, completer: Callable[..., Iterable[str]]) -> None:
    """Makes the shell complete an option's value by the function's results."""
    setattr(action, "completer", completer)  # noqa: B010 (argcomplete's own way; argparse knows no such attribute)


def complete_at_file(prefix: str, **_: object) -> list[str]:
    """Returns the files for @FILE; texts are not completed."""
    from argcomplete.completers import FilesCompleter

    return [f"@{file}" for file in FilesCompleter()(prefix[1:])] if prefix.startswith("@") else []


# Values that stand for a file, as with curl and HTTPie: @FILE, and @- or - for standard input.
_STDIN = ("-", "@-")


def read_text(value: str, flag: str) -> str:
    """Returns the value, or the whole file that it stands for without the line break at its end. Raises SetupError."""
    if value not in _STDIN and not value.startswith("@"):
        return value
    content = read_bytes("-" if value in _STDIN else value[1:], flag)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SetupError(f"{flag} {value}: is not UTF-8") from error
    return text.removesuffix("\n").removesuffix("\r")


def read_lines(values: Sequence[str], flag: str) -> list[str]:
    """Returns the values; for a file its lines, except empty lines. Raises SetupError."""
    lines: list[str] = []
    for value in values:
        text = read_text(value, flag)
        is_file = text is not value
        lines += [line.removesuffix("\r") for line in text.split("\n") if line.strip()] if is_file else [text]
    if not lines:
        raise SetupError(f"{flag} {' '.join(values)}: has no text")
    return lines


def read_bytes(file: str, flag: str) -> bytes:
    """Returns the content of a file, or of standard input, which - stands for. Raises SetupError."""
    with reporting_os_errors(f"{flag} {file}: cannot be read"):
        return sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Prints rows, the heading first, with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


_Handler: TypeAlias = Callable[[int, FrameType | None], object]
_IGNORED_SIGNAL = 2


@contextlib.contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """Turns SIGTERM into an exception in the block, which then cleans up. The exit code is as shells expect.

    The second SIGTERM or Ctrl-C is ignored, because wrappers and impatient users send two within milliseconds, and the
    block is still cleaning up. From the third signal on, each raises again: it ends a clean-up that hangs.
    """
    with _handling_signals(_raise_signal):
        yield


async def ended_by_signals(work: Awaitable[KindT]) -> KindT:
    """Returns the result of `work`, which the first SIGTERM or Ctrl-C cancels; then raises as ending_on_sigterm does.

    An exception that a handler raises on an event loop can be lost in a callback.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    received: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) > 1:
            _raise_signal(number, frame)
        elif task:
            loop.call_soon_threadsafe(task.cancel)

    with _handling_signals(end):
        try:
            return await work
        except asyncio.CancelledError:
            if received:
                _raise_signal(received[0], None)
            raise


def _raise_signal(number: int, frame: FrameType | None) -> None:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)


@contextlib.contextmanager
def _handling_signals(end: _Handler) -> Iterator[None]:
    """Calls `end` for SIGTERM and Ctrl-C in the block, but not for the second signal."""
    count = 0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal count
        count += 1
        if count != _IGNORED_SIGNAL:
            end(number, frame)

    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, handle)}
    if callable(signal.getsignal(signal.SIGINT)):  # a command in the background of a shell ignores Ctrl-C
        before[signal.SIGINT] = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
