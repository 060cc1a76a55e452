"""docs/reference/cli.md, from the parsers of the command line."""

import argparse
from collections.abc import Iterator

from neuronpipe.cli import make_parser
from neuronpipe.cli.serve import SERVICES
from tests.reference.markdown import NOTE, code, table, text

_HEAD = f"""# CLI reference

{NOTE.format("the parsers of `neuronpipe/cli`")}

`neuronpipe COMMAND --help` prints the options of a command, `neuronpipe --version` the version. `python -m neuronpipe`
is the same as `neuronpipe`.

| Exit code | Meaning |
|---|---|
| 0 | done |
| 1 | the request or the service failed |
| 2 | the command, a setting or a bundle is at fault; the message names it |
| 130 | interrupted by Ctrl-C |"""


def page() -> str:
    """The page."""
    return "\n".join([_HEAD, *_commands(make_parser())]) + "\n"


def _commands(parser: argparse.ArgumentParser) -> Iterator[str]:
    """The sections of a parser's commands, or where it has none its own section."""
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    for group in groups:
        helps = {choice.dest: choice.help or "" for choice in group._choices_actions}
        for name, command in group.choices.items():
            # Options of its own may stand beside commands that can be left out.
            if not any(
                isinstance(action, argparse._SubParsersAction) and action.required for action in command._actions
            ):
                summary = text(helps[name])
                yield from ("", f"## {command.prog}", "", f"{summary[0].upper()}{summary[1:]}.")
                yield from options_of(command)
            yield from _commands(command)


def options_of(command: argparse.ArgumentParser) -> Iterator[str]:
    """The lines of the options of one command, as a table."""
    if command.prog.endswith("serve"):
        links = [f"[`{service}`](configuration.md#neuronpipe-serve-{service})" for service in SERVICES]
        yield from ("", f"`neuronpipe serve SERVICE [OPTION…]`. The options of each service: {', '.join(links)}.")
        return
    left_out = (argparse._HelpAction, argparse._SubParsersAction)
    actions = [action for action in command._actions if not isinstance(action, left_out)]
    rows = [[_usage(action), _rule(action, command), text((action.help or "") % vars(action))] for action in actions]
    yield from table(["Option", "Rule", "Meaning"], rows)


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
    value = " ".join(action.metavar) if isinstance(action.metavar, tuple) else action.metavar or action.dest.upper()
    if action.choices and not action.metavar:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    if action.nargs == 0:
        return code(_name(action))
    return code(f"{_name(action)} {value}" if action.option_strings else f"{value}…" if action.nargs == "+" else value)


def _name(action: argparse.Action) -> str:
    return ", ".join(action.option_strings) or str(action.metavar)
