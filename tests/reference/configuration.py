"""docs/reference/configuration.md, from the classes of the settings."""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args, get_origin

from annotated_types import Ge, Gt, Le
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from neuronpipe.bulk.transform.near_engine import TransformSettings
from neuronpipe.cli.serve import SERVICES, settings_of, settings_parser
from neuronpipe.core.settings import Settings, declared_in, fields_of
from neuronpipe.measure.acceptance_process import AcceptSettings
from neuronpipe.platform.cache.settings import CacheCommandSettings
from tests.reference.markdown import NOTE, code, table, text

_KIB = 1 << 10
_UNITS = ("bytes", "KiB", "MiB", "GiB")

_HEAD = f"""# Configuration reference

{NOTE.format("the classes of the settings (`settings.py` of each wing)")}

In short:

- Each setting is an option of the command line and an environment variable: `--max-batch-size` of
  `serve neuron-executor` is `NEURONPIPE_NEURON_EXECUTOR_MAX_BATCH_SIZE`. The
  [prefix of each service](#services-and-commands) is below.
- The command line takes precedence. An empty variable counts as not set. A variable that begins with the prefix of the
  service and is no setting of it is an error.
- `_s` is seconds, `_ms` milliseconds, `_bytes` bytes, `_tokens` tokens of the model. A time or a size may have a unit
  of its own: `250ms`, `30s`, `10m`, `2h`, `7d`; `256MiB`, `1.5GB`.
- `neuronpipe serve SERVICE --help` prints the needed settings and those that are often set, `--help-all` all of them.
- Most services need [one setting](#needed). Change [others](#rarely-set) for a reason only."""

_OTHER = """
## Other variables

These are read where the service or command needs them:

| Variable | Effect |
|---|---|
| `OTEL_*` | where traces and metrics are exported, and which requests are sampled: [Tracing](../tracing.md) |
| `NEURON_RT_VISIBLE_CORES`, `NEURON_RT_NUM_CORES` | the NeuronCores of the process; `--cores` must agree |
| `NEURONPIPE_LOG` | `warnings`, `changes` (default) or `requests`: lines of the [log](../observability.md#logs) |
| `NEURONPIPE_TARGET` | the gateway that commands call without `--target` |
| `NEURONPIPE_JOB_JOBS_REDIS_URL` | the Redis of `neuronpipe job dead` without `--jobs-redis-url` |
| `NEURONPIPE_API_KEY` | the API key or token that the Python client and the commands call with |
| `HF_TOKEN`, `HF_HUB_OFFLINE`, `HF_HOME` | `neuronpipe compile`: access to the Hugging Face Hub, by huggingface-hub |
"""


@dataclass(frozen=True, slots=True)
class _Owner:
    """A service or command with settings. `options`: what stands for its options where it has others."""

    title: str
    kind: type[Settings]
    options: str = ""

    @property
    def name(self) -> str:
        """The last word of the command."""
        return self.title.rpartition(" ")[2]


_CACHE = "[its commands](cli.md#neuronpipe-cache-stats) take some of them as options"
_OWNERS = (
    *(_Owner(f"neuronpipe serve {service}", settings_of(service)) for service in SERVICES),
    _Owner("neuronpipe cache", CacheCommandSettings, _CACHE),
    _Owner("neuronpipe accept", AcceptSettings),
    _Owner("neuronpipe transform", TransformSettings),
)
_TABLE = ["Setting", "Of", "Default", "Valid", "Meaning"]


def page() -> str:
    """The page."""
    return "\n".join(_lines()) + "\n" + _OTHER


def _lines() -> Iterator[str]:
    yield _HEAD
    often = {name for service in SERVICES for name in _first_options(service)}
    needed: list[list[str]] = []
    first: list[list[str]] = []
    topics: dict[str, list[list[str]]] = {}
    for name, (topic, variants) in _settings().items():
        for variant in variants:
            [(_, field), *_] = variant
            owners = [owner for owner, _ in variant]
            row = [_named(name), _of(owners), _defaults(name, variant), bounds_of(name, field)]
            rows = needed if field.is_required() else first if name in often else topics.setdefault(topic, [])
            rows.append([*row, text(field.description or "")])
    yield from ("", "## Needed", *table(_TABLE, needed))
    yield from ("", "## Often set", *table(_TABLE, first))
    yield from ("", "## Rarely set")
    for topic, rows in topics.items():
        yield from ("", f"### {topic}", *table(_TABLE, rows))
    yield from ("", "## Services and commands")
    for owner in _OWNERS:
        names = ", ".join(_named(name) for name in fields_of(owner.kind))
        prefix = code(owner.kind.prefix)
        yield from ("", f"### {owner.title}", "", f"Prefix of the variables: {prefix}.")
        yield from ("", f"{names}{f'; {owner.options}' if owner.options else ''}.")


# The owners that have a setting alike but for its default.
_Variant: TypeAlias = list[tuple[_Owner, FieldInfo]]


def _settings() -> dict[str, tuple[str, list[_Variant]]]:
    """Each setting by its name, with its topic."""
    found: dict[str, tuple[str, list[_Variant]]] = {}
    for owner in _OWNERS:
        for part, name, field in declared_in(owner.kind):
            _, variants = found.setdefault(name, (str(part.__doc__).partition(".")[0], []))
            alike = [variant for variant in variants if _rule(name, variant[0][1]) == _rule(name, field)]
            if alike:
                alike[0].append((owner, field))
            else:
                variants.append([(owner, field)])
    return found


def _rule(name: str, field: FieldInfo) -> tuple[str, str]:
    return bounds_of(name, field), field.description or ""


def _defaults(name: str, variant: _Variant) -> str:
    """The default, or each default with those that have it."""
    owners: dict[str, list[_Owner]] = {}
    for owner, field in variant:
        owners.setdefault(default_of(name, field), []).append(owner)
    if len(owners) == 1:
        return next(iter(owners))
    return "; ".join(f"{default} ({_of(having)})" for default, having in owners.items())


def _first_options(service: str) -> Iterator[str]:
    """The settings that `neuronpipe serve SERVICE --help` shows."""
    for action in settings_parser(service, shows_all=False)._actions:
        if action.help != argparse.SUPPRESS and action.dest in fields_of(settings_of(service)):
            yield action.dest


def _named(name: str) -> str:
    return code(f"--{name.replace('_', '-')}")


def _of(owners: Sequence[_Owner]) -> str:
    """The services and commands that have a setting, in few words."""
    names = [owner.name for owner in owners]
    if len(SERVICES) <= len(names) and names[: len(SERVICES)] == list(SERVICES):
        names = ["every service", *names[len(SERVICES) :]]
    return ", ".join(names)


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
