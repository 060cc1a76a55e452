"""docs/reference/configuration.md, from the classes of the settings."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from neuronpipe.bulk.transform.near_engine import TransformSettings
from neuronpipe.cli.serve import SERVICES, settings_of
from neuronpipe.core.settings import Settings, fields_of, variable_name
from neuronpipe.measure.acceptance_process import AcceptSettings
from neuronpipe.platform.cache.settings import CacheCommandSettings
from neuronpipe.platform.process.settings import ServerSettings
from tests.reference.markdown import NOTE, code, table, text

_KIB = 1 << 10
_UNITS = ("bytes", "KiB", "MiB", "GiB")

_HEAD = f"""# Configuration reference

{NOTE.format("the classes of the settings (`settings.py` of each wing)")}

Each setting is an option of the command line and an environment variable. The command line takes precedence. An empty
variable counts as not set. A variable that begins with the prefix of the service and is not in its table is an error.
`neuronpipe serve SERVICE --help` prints the first options, `--help-all` all of them.

Units are part of the names: `_s` is seconds, `_ms` milliseconds, `_bytes` bytes, `_tokens` tokens of the model. A time
or a size may have a unit of its own: `250ms`, `30s`, `10m`, `2h`, `7d`; `256MiB`, `1.5GB`."""

_OTHER = """
## Other variables

These are read where the service or command needs them:

| Variable | Effect |
|---|---|
| `OTEL_*` | where traces and metrics are exported, and which requests are sampled: [Tracing](../tracing.md) |
| `NEURON_RT_VISIBLE_CORES`, `NEURON_RT_NUM_CORES` | the NeuronCores of the process; `--cores` must agree |
| `NEURONPIPE_API_KEY` | the API key or token that the Python client and the commands call with |
| `HF_TOKEN`, `HF_HUB_OFFLINE`, `HF_HOME` | `neuronpipe compile`: access to the Hugging Face Hub, by huggingface-hub |
"""


def page() -> str:
    """The page."""
    return "\n".join(_lines()) + "\n" + _OTHER


def _lines() -> Iterator[str]:
    yield _HEAD
    for service in SERVICES:
        yield from _section(f"neuronpipe serve {service}", settings_of(service))
    some_options = "[its commands](cli.md#neuronpipe-cache-stats) take some of them as options"
    yield from _section("neuronpipe cache", CacheCommandSettings, some_options)
    yield from _section("neuronpipe accept", AcceptSettings)
    yield from _section("neuronpipe transform", TransformSettings)


def _section(title: str, kind: type[Settings], options: str = "") -> Iterator[str]:
    prefix = code(kind.prefix)
    yield from ("", f"## {title}", "", f"Prefix of the variables: {prefix}" + (f"; {options}." if options else "."))
    rows = []
    for name, field in sorted(fields_of(kind).items(), key=lambda item: item[0] not in fields_of(ServerSettings)):
        setting = ("" if options else f"`--{name.replace('_', '-')}`<br>") + code(variable_name(kind, name))
        rows.append([setting, default_of(name, field), bounds_of(name, field), text(field.description or "")])
    yield from table(["Setting", "Default", "Valid", "Meaning"], rows)


def default_of(name: str, field: FieldInfo) -> str:
    """The default as it is written."""
    if field.default is PydanticUndefined:
        return "required"
    return _value(name, field.default) if field.default not in ("", None) else "empty"


def bounds_of(name: str, field: FieldInfo) -> str:
    """The values that are valid, where there is more to say than the type."""
    if get_origin(field.annotation) is Literal:
        return ", ".join(map(code, get_args(field.annotation)))
    rules = {type(rule): rule for rule in field.metadata}
    limits = ((Ge, "at least", "ge"), (Gt, "more than", "gt"), (Le, "at most", "le"))
    found = [f"{words} {_value(name, getattr(rules[kind], word))}" for kind, words, word in limits if kind in rules]
    patterns = [code(rule.pattern) for rule in field.metadata if getattr(rule, "pattern", None)]
    return ", ".join([*found, *patterns]) or _TYPES.get(field.annotation, "")


# int | str is `cores`, whose description says which strings there are.
_TYPES: dict[Any, str] = {
    str: "text",
    Path: "a path",
    Path | None: "a path",
    int | str: "a number or ranges",
    bool: "an option without a value; as a variable `true`",
}


def _value(name: str, value: object) -> str:
    """A value as it is written, and bytes also in the largest unit that divides them."""
    if not isinstance(value, int | float):
        return code(value)
    number, unit = int(value), 0
    while name.endswith("_bytes") and number and number % _KIB == 0:
        number, unit = number // _KIB, unit + 1
    return code(f"{value:g}" if isinstance(value, float) else value) + (f" ({number} {_UNITS[unit]})" if unit else "")
