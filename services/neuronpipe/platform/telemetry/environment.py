"""Reads the standard variables of OpenTelemetry that decide what is exported.

Exporters read the others (headers, TLS, time-outs).
https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from neuronpipe.core.errors import SetupError

Protocol: TypeAlias = Literal["grpc", "http/protobuf"]

# sampler → whether the caller's decision takes precedence, and the ratio; None: the ratio is the argument.
_SAMPLERS: dict[str, tuple[bool, float | None]] = {
    "always_on": (False, 1.0),
    "always_off": (False, 0.0),
    "traceidratio": (False, None),
    "parentbased_always_on": (True, 1.0),
    "parentbased_always_off": (True, 0.0),
    "parentbased_traceidratio": (True, None),
}
_DEFAULT_SAMPLER = "parentbased_traceidratio"
# One request in a hundred: the cost is not measurable (docs/decisions/0011).
_DEFAULT_RATIO = 0.01
# The specification's default of 2048 spans lasts a fifth of a second in a gateway where all requests are sampled.
_DEFAULT_QUEUE_SPANS = 16_384
_DEFAULT_INTERVAL_MS = 60_000
# Variables that OpenTelemetry's libraries read as numbers. For another value the libraries log a traceback, or an error
# without the variable's name.
_READ_BY_LIBRARIES = re.compile(
    r"OTEL_(BSP_(SCHEDULE_DELAY|EXPORT_TIMEOUT)|EXPORTER_OTLP_((TRACES|METRICS)_)?TIMEOUT|\w+_LIMIT)"
)

_CREDENTIAL_PROVIDER = re.compile(r"OTEL_PYTHON_EXPORTER_OTLP_HTTP_((TRACES|METRICS)_)?CREDENTIAL_PROVIDER")


@dataclass(frozen=True, slots=True)
class Environment:
    """The values of OpenTelemetry's variables. A protocol is None if its signal is not exported by OTLP.

    `has_credential_provider`: an entry point makes the sessions of OTLP over HTTP.
    """

    traces: Protocol | None
    metrics: Protocol | None
    ratio: float
    honours_parent: bool
    max_queue_spans: int
    metric_interval_s: float
    has_service_name: bool
    has_credential_provider: bool = False


def read_environment(variables: Mapping[str, str]) -> Environment:
    """Reads the variables. Raises SetupError if a value is invalid."""
    is_disabled = variables.get("OTEL_SDK_DISABLED", "").lower() == "true"
    honours_parent, ratio = _sampler(variables)
    traces, metrics = (None if is_disabled else _protocol(variables, signal) for signal in ("TRACES", "METRICS"))
    if traces or metrics:
        _check_numbers_of_libraries(variables)
    return Environment(
        traces=traces,
        metrics=metrics,
        ratio=0.0 if is_disabled else ratio,
        honours_parent=honours_parent,
        max_queue_spans=int(_number(variables, "OTEL_BSP_MAX_QUEUE_SIZE", _DEFAULT_QUEUE_SPANS, lowest=1)),
        metric_interval_s=_number(variables, "OTEL_METRIC_EXPORT_INTERVAL", _DEFAULT_INTERVAL_MS, lowest=1) / 1000,
        has_service_name=bool(variables.get("OTEL_SERVICE_NAME")),
        has_credential_provider=any(map(_CREDENTIAL_PROVIDER.fullmatch, variables)),
    )


def _protocol(variables: Mapping[str, str], signal: str) -> Protocol | None:
    """Returns the protocol of a signal; None if the signal is not exported.

    Without an endpoint nothing is exported, unlike the specification's default of localhost.
    """
    exporter = variables.get(f"OTEL_{signal}_EXPORTER", "")
    if exporter not in ("", "otlp", "none"):
        raise SetupError(f"OTEL_{signal}_EXPORTER: {exporter!r} is neither otlp nor none")
    has_endpoint = any(
        variables.get(name) for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT")
    )
    if exporter == "none" or not (exporter or has_endpoint):
        return None
    name = f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL"
    protocol = variables.get(name) or variables.get("OTEL_EXPORTER_OTLP_PROTOCOL") or "grpc"
    if protocol == "grpc":
        return "grpc"
    if protocol == "http/protobuf":
        return "http/protobuf"
    raise SetupError(f"{name}: {protocol!r} is neither grpc nor http/protobuf")


def _sampler(variables: Mapping[str, str]) -> tuple[bool, float]:
    name = variables.get("OTEL_TRACES_SAMPLER") or _DEFAULT_SAMPLER
    if name not in _SAMPLERS:
        raise SetupError(f"OTEL_TRACES_SAMPLER: {name!r} is not one of {', '.join(_SAMPLERS)}")
    honours_parent, ratio = _SAMPLERS[name]
    if ratio is None:
        # A sampler without an argument gets the specification's 1. Without a sampler, our own default applies.
        default = 1.0 if variables.get("OTEL_TRACES_SAMPLER") else _DEFAULT_RATIO
        ratio = _number(variables, "OTEL_TRACES_SAMPLER_ARG", default, lowest=0, highest=1)
    return honours_parent, ratio


def _check_numbers_of_libraries(variables: Mapping[str, str]) -> None:
    for name, text in variables.items():
        if _READ_BY_LIBRARIES.fullmatch(name) and not (name.endswith("_LIMIT") and text.strip().lower() == "unset"):
            _parsed(name, text, lowest=1 if name.endswith("_DELAY") else 0, kind=float if "_OTLP_" in name else int)


def _number(variables: Mapping[str, str], name: str, default: float, *, lowest: float, highest: float = 1e9) -> float:
    return _parsed(name, text, lowest, highest) if (text := variables.get(name)) else default


def _parsed(name: str, text: str, lowest: float, highest: float = 1e9, kind: type[float] = float) -> float:
    try:
        number = kind(text)
    except ValueError:
        raise SetupError(f"{name}: {text!r} is not a {'whole number' if kind is int else 'number'}") from None
    if not lowest <= number <= highest:  # also false for NaN
        raise SetupError(f"{name}: {text} is not from {lowest:g} to {highest:g}")
    return number
