"""The reference pages: how they write what the code says. That they are up to date is `make verify-docs`."""

import argparse
import shlex
from typing import Literal

import pytest
from pydantic import Field

from neuronpipe.api.v1 import inference_pb2, models_pb2, tasks_pb2, traces_pb2
from neuronpipe.cli import make_parser
from neuronpipe.cli.examples import example_command
from neuronpipe.cli.serve import SERVICES, read_arguments, settings_of
from neuronpipe.core.settings import Settings, fields_of
from tests.reference import api, cli, configuration, parts
from tests.reference.markdown import table, text


class _Settings(Settings):
    a_bytes: int = Field(64 << 20, ge=1 << 10, description="first")
    b_s: float = Field(0.5, gt=0, le=60, description="second")
    c: Literal["auto", "never"] = Field("auto", description="third")
    d: str = Field(description="fourth")


@pytest.mark.parametrize(
    ("name", "default", "valid"),
    [
        ("a_bytes", "`67108864` (64 MiB)", "at least `1024` (1 KiB)"),
        ("b_s", "`0.5`", "more than `0`, at most `60`"),
        ("c", "`auto`", "`auto`, `never`"),
        ("d", "required", "text"),
    ],
)
def test_a_setting_has_its_default_and_its_bounds_with_units(name: str, default: str, valid: str) -> None:
    field = _Settings.model_fields[name]
    assert (configuration.default_of(name, field), configuration.bounds_of(name, field)) == (default, valid)


def test_every_setting_of_every_service_is_in_one_table_and_at_its_service() -> None:
    page = configuration.page()
    tables, _, services = page.partition("\n## Services and commands\n")
    for service in SERVICES:
        section = services.partition(f"### neuronpipe serve {service}\n")[2].partition("\n### ")[0]
        for name in fields_of(settings_of(service)):
            option = f"`--{name.replace('_', '-')}`"
            assert f"\n| {option} | " in tables, name
            assert option in section, (service, name)


def test_a_default_that_differs_names_those_that_have_it() -> None:
    row = next(line for line in configuration.page().splitlines() if line.startswith("| `--executor-target` |"))
    assert row.startswith("| `--executor-target` | all, gateway | `local` (all); `127.0.0.1:50052` (gateway) |")


def test_an_option_has_its_value_and_its_rule() -> None:
    parser = argparse.ArgumentParser(prog="do")
    parser.add_argument("files", nargs="+", metavar="FILE", help="what to read")
    parser.add_argument("--level", type=int, choices=[1, 2], default=2, help="how much (default: %(default)s)")
    parser.add_argument("--out", required=True, metavar="DIR", help="where | to <b>")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--fast", action="store_true", help="x")
    group.add_argument("--slow", action="store_true", help="y")
    assert list(cli.options_of(parser))[3:] == [
        "| `FILE…` | required | what to read |",
        "| `--level {1,2}` |  | how much (default: 2) |",
        r"| `--out DIR` | required | where \| to &lt;b> |",
        "| `--fast` | not with `--slow` | x |",
        "| `--slow` | not with `--fast` | y |",
    ]


@pytest.mark.parametrize("command", [pytest.param(command, id=command.prog) for command in cli.commands(make_parser())])
def test_the_help_of_a_command_has_its_purpose_and_an_example_that_it_accepts(
    command: argparse.ArgumentParser, capsys: pytest.CaptureFixture[str]
) -> None:
    shown, example = command.format_help(), example_command(command.prog)
    assert command.description
    assert command.description in shown
    assert f"\nexample:\n  {example}\n" in shown
    words = shlex.split(example)[1:]
    assert " ".join(words).startswith(command.prog.removeprefix("neuronpipe "))
    make_parser().parse_args(words)  # ends the process with what is wrong


@pytest.mark.parametrize("service", SERVICES)
def test_the_example_of_a_service_has_settings_that_it_accepts(service: str) -> None:
    read_arguments(service, shlex.split(example_command(f"neuronpipe serve {service}"))[3:])


def test_an_option_that_many_commands_have_alike_is_listed_once() -> None:
    lines = cli.page().splitlines()
    assert sum(line.startswith("| `--tls-ca FILE`") for line in lines) == 1
    assert sum("Shared options](#shared-options): " in line and "`--tls-ca`" in line for line in lines) > 10


def test_every_message_enum_and_method_of_the_public_files_has_its_section() -> None:
    page = api.page()
    for file in (inference_pb2, models_pb2, tasks_pb2, traces_pb2):
        names = [*file.DESCRIPTOR.message_types_by_name, *file.DESCRIPTOR.enum_types_by_name]
        for service in file.DESCRIPTOR.services_by_name.values():
            names += [service.name, *(f"{service.name}.{method.name}" for method in service.methods)]
        assert [name for name in names if f"# {name}\n" not in page] == []


def test_text_is_no_markup_but_for_code() -> None:
    assert text("a <s> of\n  `x < [y]`, [z] and *") == r"a &lt;s> of `x < [y]`, \[z\] and \*"


def test_a_cell_cannot_break_its_row() -> None:
    assert list(table(["a"], [["x|y"]])) == ["", "| a |", "|---|", r"| x\|y |"]


def test_a_page_without_the_place_of_a_part_is_told_what_to_write() -> None:
    written = "<!-- tasks: made by make fix-docs -->, an empty line and <!-- end -->"
    with pytest.raises(ValueError, match=f"^docs/oip.md has no place for the tasks; write, each on a line: {written}$"):
        parts.filled("oip.md", "")
    assert parts.filled("oip.md", written.replace(", an empty line and ", "\n\n")).endswith("\n<!-- end -->")
