"""docs/reference/cli.md, from the parsers of the command line."""

import argparse
import re
from collections import Counter
from collections.abc import Container, Iterator

from neuronpipe.cli import make_parser
from neuronpipe.cli.examples import example_command
from neuronpipe.cli.serve import SERVICES
from tests.reference.markdown import NOTE, code, table, text

_HEAD = f"""# CLI reference

{NOTE.format("the parsers of `neuronpipe/cli`")}

`neuronpipe COMMAND --help` prints purpose, options and an example of a command, `neuronpipe --version` the version.
`python -m neuronpipe` is the same as `neuronpipe`. Options that several commands have alike are in
[one table](#shared-options) at the end.

| Exit code | Meaning |
|---|---|
| 0 | done |
| 1 | the request or the service failed |
| 2 | the command, a setting or a bundle is at fault; the message names it |
| 130 | interrupted by Ctrl-C |"""

_TABLE = ["Option", "Rule", "Meaning"]
_LEFT_OUT = (argparse._HelpAction, argparse._SubParsersAction)
# How many commands have an option alike that is listed once.
_SHARED = 4


def page() -> str:
    """The page."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield _HEAD
    found = list(commands(make_parser()))
    having = Counter(tuple(row) for command in found for row in rows_of(command) if not command.prog.endswith("serve"))
    shared = {row: count for row, count in having.items() if count >= _SHARED}
    for command in found:
        yield from ("", f"## {command.prog}", "", text(command.description or ""))
        yield from ("", "```text", synopsis_of(command), f"example: {example_command(command.prog)}", "```")
        yield from options_of(command, shared)
    yield from ("", "## Shared options", *table(_TABLE, [list(row) for row in shared]))


def commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The commands of a parser, and theirs. A command that needs one of its own commands is not itself there."""
    for group in (action for action in parser._actions if isinstance(action, argparse._SubParsersAction)):
        for command in group.choices.values():
            # Options of its own may stand beside commands that can be left out.
            if not any(
                isinstance(action, argparse._SubParsersAction) and action.required for action in command._actions
            ):
                yield command
            yield from commands(command)


def synopsis_of(command: argparse.ArgumentParser) -> str:
    """How a command is called: what it needs, and whether it has options."""
    grouped = [group for group in command._mutually_exclusive_groups if group.required]
    alternatives = {id(action) for group in grouped for action in group._group_actions}
    actions = [action for action in command._actions if not isinstance(action, _LEFT_OUT)]
    needed = [action for action in actions if id(action) not in alternatives and _rule(action, command) == "required"]
    flags = [_called(action) for action in needed if action.option_strings]
    flags += [f"({' | '.join(_called(action) for action in group._group_actions)})" for group in grouped]
    words = [command.prog, *(_called(action) for action in needed if not action.option_strings), *flags]
    return " ".join([*words, *(["[options]"] if len(actions) > len(needed) + len(alternatives) else [])])


def options_of(command: argparse.ArgumentParser, shared: Container[tuple[str, ...]] = ()) -> Iterator[str]:
    """The lines of the options of one command, as a table, and the names of those that are shared."""
    if command.prog.endswith("serve"):
        links = [f"[`{service}`](configuration.md#neuronpipe-serve-{service})" for service in SERVICES]
        yield from ("", f"`neuronpipe serve SERVICE [OPTION…]`. The options of each service: {', '.join(links)}.")
        return
    rows = rows_of(command)
    if own := [row for row in rows if tuple(row) not in shared]:
        yield from table(_TABLE, own)
    if others := [code(re.split("[ ,`]", row[0].strip("`"))[0]) for row in rows if tuple(row) in shared]:
        yield from ("", f"[Shared options](#shared-options): {', '.join(others)}.")


def rows_of(command: argparse.ArgumentParser) -> list[list[str]]:
    """The options of one command: usage, rule and meaning of each."""
    actions = [action for action in command._actions if not isinstance(action, _LEFT_OUT)]
    return [[_usage(action), _rule(action, command), text((action.help or "") % vars(action))] for action in actions]


def _rule(action: argparse.Action, command: argparse.ArgumentParser) -> str:
    """When the option must or may be given; nothing for always."""
    if action.required or (not action.option_strings and action.nargs not in ("?", "*")):
        return "required"
    for group in command._mutually_exclusive_groups:
        if action in group._group_actions:
            others = ", ".join(code(_name(other)) for other in group._group_actions if other is not action)
            return f"this or {others}" if group.required else f"not with {others}"
    titles = [group.title for group in command._action_groups if action in group._group_actions]
    return next((title for title in titles if title and title.startswith("for ")), "")


def _usage(action: argparse.Action) -> str:
    """The option with the name of its value, or with its values."""
    return code(_called(action))


def _called(action: argparse.Action) -> str:
    value = " ".join(action.metavar) if isinstance(action.metavar, tuple) else action.metavar or action.dest.upper()
    if action.choices and not action.metavar:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    if action.nargs == 0:
        return _name(action)
    return f"{_name(action)} {value}" if action.option_strings else f"{value}…" if action.nargs == "+" else value


def _name(action: argparse.Action) -> str:
    return ", ".join(action.option_strings) or str(action.metavar)
