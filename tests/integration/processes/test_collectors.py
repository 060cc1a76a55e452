"""Collectors that are down or never answer: callers notice nothing, and what is lost is counted."""

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from demo.processes import ServiceProcess
from neuronpipe.client import Client
from tests.callers.metrics import series_of
from tests.servers.certificates import Authority, replace
from tests.servers.collector import Collector, grpc_collector, http_collector

pytestmark = [pytest.mark.local_only, pytest.mark.sampled]

_REQUESTS = 150
_QUEUE = 64
# The last spans and the last metrics may take three seconds each to leave, then their exporters are given up. The rest
# is for a machine that has other work.
_END_LIMIT_S = 25


@contextmanager
def _nobody() -> Iterator[int]:
    """A port that refuses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        yield probe.getsockname()[1]


@contextmanager
def _silent() -> Iterator[int]:
    """A port that takes connections and never says a word."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(64)
        yield listening.getsockname()[1]


def _lost(process: ServiceProcess) -> dict[str, float]:
    found = series_of(process).items()
    return {name.split('"')[1]: value for name, value in found if name.startswith("neuronpipe_telemetry_spans_total")}


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
@pytest.mark.parametrize("collector", [_nobody, _silent], ids=["down", "silent"])
def test_requests_are_answered_and_the_service_ends_whatever_its_collector_does(
    fake_repository: Path, collector: object, protocol: str
) -> None:
    assert callable(collector)
    with collector() as port:
        environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
            "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
            "OTEL_TRACES_SAMPLER": "always_on",
            "OTEL_BSP_MAX_QUEUE_SIZE": str(_QUEUE),
        }
        options = ("--repository", str(fake_repository), "--metrics-listen", "127.0.0.1:0")
        with ServiceProcess("all", *options, environment=environment) as process:
            with Client(process.wait_until_ready().target, timeout_s=5) as client:
                for number in range(_REQUESTS):
                    client.embed("minilm", f"text {number}")
            lost = _lost(process)
            process.signal(signal.SIGTERM)
            assert process.wait(_END_LIMIT_S) == 0
    # Seven spans each: the request's, three stages', two of the prediction, a batch's. What is with the collector has
    # no end yet.
    assert lost["exported"] == 0
    assert lost["dropped"] >= 7 * _REQUESTS - 3 * _QUEUE


def _over_tls(folder: Path, protocol: str, ca: str) -> dict[str, str]:
    """Files for a collector and its callers alike, and what callers are told."""
    authority = Authority()
    authority.issue().write(folder)
    replace(folder / "ca.crt", authority.certificate)
    replace(folder / "other.crt", Authority("another").certificate)
    return {
        "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
        "OTEL_EXPORTER_OTLP_CERTIFICATE": str(folder / ca),
        "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE": str(folder / "tls.crt"),
        "OTEL_EXPORTER_OTLP_CLIENT_KEY": str(folder / "tls.key"),
        "OTEL_TRACES_SAMPLER": "always_on",
        "OTEL_METRIC_EXPORT_INTERVAL": "100",
        # Over HTTP, requests lets these go first where they are set.
        "REQUESTS_CA_BUNDLE": "",
        "CURL_CA_BUNDLE": "",
    }


@contextmanager
def _sending(protocol: str, folder: Path, repository: Path, environment: dict[str, str]) -> Iterator[Collector]:
    """A collector that asks for certificates, and a process that has answered a request."""
    with (grpc_collector if protocol == "grpc" else http_collector)(tls=folder) as collector:
        environment["OTEL_EXPORTER_OTLP_ENDPOINT"] = collector.endpoint
        with ServiceProcess("all", "--repository", str(repository), environment=environment) as process:
            with Client(process.wait_until_ready().target) as client:
                client.embed("minilm", "a text")
            yield collector
            process.signal(signal.SIGTERM)  # the last spans are exported now
            assert process.wait(_END_LIMIT_S) == 0


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_spans_and_metrics_are_exported_over_mtls(fake_repository: Path, tmp_path: Path, protocol: str) -> None:
    environment = _over_tls(tmp_path, protocol, "ca.crt")
    with _sending(protocol, tmp_path, fake_repository, environment) as collector:
        collector.wait_until(lambda seen: ("all", "neuronpipe.request.duration") in seen.points and bool(seen.spans))


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_a_collector_of_another_authority_gets_nothing(fake_repository: Path, tmp_path: Path, protocol: str) -> None:
    environment = _over_tls(tmp_path, protocol, "other.crt")
    with _sending(protocol, tmp_path, fake_repository, environment) as collector:
        pass
    assert (collector.spans, collector.points) == ([], {})
