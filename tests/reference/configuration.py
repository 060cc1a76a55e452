"""docs/reference/configuration.md, from the classes of the settings."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from neuronpipe.acceptance.settings import AcceptSettings
from neuronpipe.cache.settings import CacheCommandSettings
from neuronpipe.cli.serve import SERVICES, settings_of
from neuronpipe.core.settings import Settings, variable_name
from neuronpipe.process.settings import ServerSettings
from tests.reference.markdown import NOTE, code, table, text

_KIB = 1 << 10
_UNITS = ("bytes", "KiB", "MiB", "GiB")

_HEAD = f"""# Configuration reference

{NOTE.format("the classes of the settings (`settings.py` of each service)")}

Each setting is an option of the command line and an environment variable. The command line takes precedence. An empty variable counts as
not set. A variable that begins with the prefix of the service and is not in its table is an error. `neuronpipe serve SERVICE --help`
prints the same.

Units are part of the names: `_s` is seconds, `_ms` milliseconds, `_bytes` bytes, `_tokens` tokens of the model."""

_OTHER = """
## Variables of other projects

These are read where the service or command needs them:

| Variable | Effect |
|---|---|
| `OTEL_*` | where traces and metrics are exported, and which requests are sampled: [Tracing](../tracing.md) |
| `NEURON_RT_VISIBLE_CORES`, `NEURON_RT_NUM_CORES` | the NeuronCores of the process; `--cores` that contradicts them is refused |
| `HF_TOKEN`, `HF_HUB_OFFLINE`, `HF_HOME` | `neuronpipe compile`: access to the Hugging Face Hub, as huggingface-hub reads them |
"""


def page() -> str:
    """The page."""
    return "\n".join(_lines()) + "\n" + _OTHER


def _lines() -> Iterator[str]:
    yield _HEAD
    for service in SERVICES:
        yield from _section(f"neuronpipe serve {service}", settings_of(service))
    yield from _section(
        "neuronpipe cache", CacheCommandSettings, "[its commands](cli.md#neuronpipe-cache-stats) take some of them as options"
    )
    yield from _section("neuronpipe accept", AcceptSettings)


def _section(title: str, kind: type[Settings], options: str = "") -> Iterator[str]:
    yield from (
        "",
        f"## {title}",
        "",
        f"Prefix of the variables: `{kind.model_config['env_prefix']}`" + (f"; {options}." if options else "."),
    )
    names = ["Variable"] if options else ["Option", "Variable"]
    rows = []
    for name, field in sorted(kind.model_fields.items(), key=lambda one: one[0] not in ServerSettings.model_fields):
        option = [] if options else [code(f"--{name.replace('_', '-')}")]
        variable = code(variable_name(kind, name))
        rows.append([*option, variable, _default(name, field), _bounds(name, field), text(field.description or "")])
    yield from table([*names, "Default", "Valid", "Meaning"], rows)


def _default(name: str, field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    return _value(name, field.default) if field.default != "" else "empty"


def _bounds(name: str, field: FieldInfo) -> str:
    """The values that are valid, where there is more to say than the type."""
    if get_origin(field.annotation) is Literal:
        return ", ".join(map(code, get_args(field.annotation)))
    rules = {type(rule): rule for rule in field.metadata}
    lowest = (
        [f"at least {_value(name, rules[Ge].ge)}"] if Ge in rules else [f"more than {_value(name, rules[Gt].gt)}"] if Gt in rules else []
    )
    highest = [f"at most {_value(name, rules[Le].le)}"] if Le in rules else []
    patterns = [code(rule.pattern) for rule in field.metadata if getattr(rule, "pattern", None)]
    return ", ".join([*lowest, *highest, *patterns]) or _TYPES[field.annotation]


# int | str is `cores`, whose description says which strings there are.
_TYPES: dict[Any, str] = {str: "text", Path: "a path", int | str: "a number or ranges"}


def _value(name: str, value: object) -> str:
    """A value as it is written, and bytes also in the largest unit that divides them."""
    if not isinstance(value, int | float):
        return code(value)
    number, unit = int(value), 0
    while name.endswith("_bytes") and number and number % _KIB == 0:
        number, unit = number // _KIB, unit + 1
    return code(f"{value:g}" if isinstance(value, float) else value) + (f" ({number} {_UNITS[unit]})" if unit else "")
