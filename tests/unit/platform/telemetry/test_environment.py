"""platform/telemetry/environment.py: the standard variables, and what they mean."""

import os

import pytest

from neuronpipe.core.errors import SetupError
from neuronpipe.platform.process.settings import ProcessSettings
from neuronpipe.platform.telemetry.environment import read_environment
from neuronpipe.platform.telemetry.start import running_telemetry

_ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317"}


def test_nothing_is_exported_unless_asked_for() -> None:
    found = read_environment({})
    assert (found.traces, found.metrics) == (None, None)


@pytest.mark.parametrize(
    ("variables", "traces", "metrics"),
    [
        (_ENDPOINT, "grpc", "grpc"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "x"}, "grpc", None),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, "grpc", None),
        (_ENDPOINT | {"OTEL_TRACES_EXPORTER": "none"}, None, "grpc"),
        (_ENDPOINT | {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, "http/protobuf", "http/protobuf"),
        (_ENDPOINT | {"OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "http/protobuf"}, "grpc", "http/protobuf"),
        (_ENDPOINT | {"OTEL_SDK_DISABLED": "true"}, None, None),
    ],
    ids=str,
)
def test_an_endpoint_or_an_exporter_turns_a_signal_on(
    variables: dict[str, str], traces: str | None, metrics: str | None
) -> None:
    found = read_environment(variables)
    assert (found.traces, found.metrics) == (traces, metrics)


@pytest.mark.parametrize(
    ("variables", "honours_parent", "ratio"),
    [
        ({}, True, 0.01),
        ({"OTEL_TRACES_SAMPLER_ARG": "0.5"}, True, 0.5),
        ({"OTEL_TRACES_SAMPLER": "parentbased_traceidratio"}, True, 1.0),  # the specification's default of the argument
        ({"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.25"}, False, 0.25),
        ({"OTEL_TRACES_SAMPLER": "always_off", "OTEL_TRACES_SAMPLER_ARG": "1"}, False, 0.0),
        ({"OTEL_TRACES_SAMPLER": "parentbased_always_on"}, True, 1.0),
    ],
    ids=str,
)
def test_samplers_are_those_of_the_specification(variables: dict[str, str], honours_parent: bool, ratio: float) -> None:
    found = read_environment(variables)
    assert (found.honours_parent, found.ratio) == (honours_parent, ratio)


@pytest.mark.parametrize(
    "variables",
    [
        {"OTEL_TRACES_SAMPLER": "jaeger_remote"},
        {"OTEL_TRACES_SAMPLER_ARG": "2"},
        {"OTEL_TRACES_SAMPLER_ARG": "nan"},
        {"OTEL_BSP_MAX_QUEUE_SIZE": "many"},
        {"OTEL_BSP_MAX_QUEUE_SIZE": "0"},
        {"OTEL_METRIC_EXPORT_INTERVAL": "0"},
        {"OTEL_TRACES_EXPORTER": "zipkin"},
        *(
            {name: value, **_ENDPOINT}
            for name, values in {
                "OTEL_BSP_SCHEDULE_DELAY": ("soon", "0", "1.5"),
                "OTEL_BSP_EXPORT_TIMEOUT": ("soon",),
                "OTEL_EXPORTER_OTLP_TIMEOUT": ("soon", "-1", "nan"),
                "OTEL_EXPORTER_OTLP_METRICS_TIMEOUT": ("soon",),
                "OTEL_ATTRIBUTE_COUNT_LIMIT": ("few", "-1"),
                "OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT": ("few", "1.5"),
            }.items()
            for value in values
        ),
    ],
    ids=str,
)
def test_a_value_without_a_meaning_names_its_variable(variables: dict[str, str]) -> None:
    with pytest.raises(SetupError, match=rf"^{next(iter(variables))}: "):
        read_environment(variables)


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_numbers_that_opentelemetry_reads_are_taken_as_it_takes_them(
    protocol: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given = {
        "OTEL_BSP_SCHEDULE_DELAY": "250",
        "OTEL_BSP_EXPORT_TIMEOUT": "250",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "2.5",
        "OTEL_ATTRIBUTE_COUNT_LIMIT": "unset",
        "OTEL_SPAN_EVENT_COUNT_LIMIT": "0",
        "OTEL_TRACES_EXPORTER": "otlp",
        "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with running_telemetry("worker", ProcessSettings(), given):
        pass
    assert not caplog.records


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_an_empty_variable_is_as_one_that_is_not_set(
    protocol: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("OTEL_BSP_SCHEDULE_DELAY", "OTEL_BSP_EXPORT_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    with running_telemetry("worker", ProcessSettings(), os.environ):
        assert "OTEL_BSP_SCHEDULE_DELAY" not in os.environ
    assert not caplog.records


def test_a_protocol_that_is_not_known_is_refused() -> None:
    problem = r"^OTEL_EXPORTER_OTLP_TRACES_PROTOCOL: 'http/json' is neither grpc nor http/pr"
    with pytest.raises(SetupError, match=problem):
        read_environment(_ENDPOINT | {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"})


def test_numbers_of_libraries_are_left_alone_where_nothing_is_exported() -> None:
    assert read_environment({"OTEL_BSP_SCHEDULE_DELAY": "soon"}).traces is None


@pytest.mark.parametrize(
    "variables", [{"OTEL_EXPORTER_OTLP_COMPRESSION": "zip"}, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://["}], ids=str
)
def test_a_variable_that_opentelemetry_cannot_use_is_named(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"OTEL_TRACES_EXPORTER": "otlp", **variables}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    problem = f"{next(iter(variables))}.*: OpenTelemetry cannot use one of these: "
    with pytest.raises(SetupError, match=problem), running_telemetry("worker", ProcessSettings(), given):
        pass
