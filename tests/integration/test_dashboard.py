"""docs/grafana.json and docs/alerts.yaml: each query names series, and labels of them, that a real scrape has."""

import contextlib
import json
import re
import urllib.request
from pathlib import Path

import pytest
import yaml
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from demo.processes import four_processes
from neuronpipe.client import Client
from neuronpipe.core.metrics import Meters, Telemetry
from neuronpipe.core.names import Metrics
from neuronpipe.platform.telemetry.prometheus import MetricsPort
from neuronpipe.platform.tls import TlsFiles, show_tls, watched_tls
from neuronpipe.stages.neuron_executor.generation.observer import GenerationObserver
from neuronpipe.stages.neuron_executor.neuron_monitor import parse_snapshot, record_snapshot
from tests.certificates import Authority
from tests.integration.job_system import job_system, text_request, until
from tests.unit.model_specs import model_spec
from tests.unit.stages.neuron_executor.fake_monitor import SAMPLE

pytestmark = pytest.mark.local_only

_DOCS = Path(__file__).parents[2] / "docs"
# Of the scraper, not of the page.
_SCRAPERS_LABELS = {"job", "instance"}


def _queries() -> dict[str, str]:
    """Every query by where it stands."""
    panels = json.loads((_DOCS / "grafana.json").read_text())["panels"]
    queries = {f"{panel['title']} {target['refId']}": target["expr"] for panel in panels for target in panel["targets"]}
    rules = [rule for group in yaml.safe_load((_DOCS / "alerts.yaml").read_text())["groups"] for rule in group["rules"]]
    return queries | {rule["alert"]: rule["expr"] for rule in rules}


@pytest.fixture(scope="module")
def series(fake_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The labels of each series, from all services after one request."""
    found: dict[str, set[str]] = {}
    tls = tmp_path_factory.mktemp("tls")
    Authority().issue().write(tls)
    # Spans are counted where they are exported: to nobody, here.
    environment = {
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:9",
        "OTEL_TRACES_SAMPLER": "always_off",
        # Whether it answers or not.
        "NEURONPIPE_TOKENIZER_REDIS_URL": "redis://127.0.0.1:9",
        "NEURONPIPE_GATEWAY_RESULT_CACHE_MODELS": "*",
    }
    with four_processes(fake_repository, "--metrics-listen", "127.0.0.1:0", environment=environment) as processes:
        with Client(processes["gateway"].target) as client:
            client.embed("minilm", "A fine day.")
        for process in processes.values():
            _scrape(str(process.wait_for("metrics")["address"]), found)
    _scrape_worker(fake_repository, found)
    # What neuron-monitor says, where there are NeuronCores.
    snapshot = parse_snapshot(
        SAMPLE.read_bytes().replace(b'"device_latency":null', b'"device_latency":{"p50":0.001}'), 4242
    )
    assert snapshot
    meters = Meters()
    record_snapshot(meters, snapshot)
    # What workers count where others died, and where somebody is to be told.
    meters.counter(Metrics.JOBS_RETRIED).add()
    meters.counter(Metrics.NOTIFICATIONS, "accepted").add()
    # What a gateway counts of a model with a shadow.
    meters.counter(Metrics.SHADOW_COPIES, "m", "2", "compared").add()
    meters.histogram(Metrics.SHADOW_AGREEMENT, "m", "2").record(1.0)
    meters.histogram(Metrics.VERSION_DURATION, "m", "2", "copy").record(1e6)
    show_tls(meters, "server", watched_tls(TlsFiles(tls / "tls.crt", tls / "tls.key"), "server"))
    # What a model that generates shows: none is served here.
    generation = GenerationObserver(Telemetry(meters=meters), model_spec("text_generation"), "openvino")
    generation.watch(running=lambda: 1, waiting=lambda: 0, blocks=lambda: 0.5)
    with contextlib.closing(MetricsPort("127.0.0.1:0", meters)) as port:
        _scrape(port.address, found)
    return found


def _scrape_worker(repository: Path, found: dict[str, set[str]]) -> None:
    """The series of a worker that has run a job."""
    with job_system(repository) as jobs, jobs.worker("--metrics-listen", "127.0.0.1:0") as worker:
        with Client(jobs.gateway.target) as client:
            client.submit([text_request("A fine day.")]).wait(60)
        address = str(worker.wait_for("metrics")["address"])

        def shows_jobs() -> bool:
            _scrape(address, found)
            return "neuronpipe_jobs_oldest_seconds" in found

        until(shows_jobs, "the worker shows jobs")


def _scrape(address: str, found: dict[str, set[str]]) -> None:
    request = urllib.request.Request(f"http://{address}/metrics", headers={"Accept": "application/openmetrics-text"})
    with urllib.request.urlopen(request) as response:
        text = response.read().decode()
    for family in text_string_to_metric_families(text):  # type: ignore[no-untyped-call]
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)


@pytest.mark.parametrize("where", _queries())
def test_a_query_names_series_and_labels_that_exist(series: dict[str, set[str]], where: str) -> None:
    query = _queries()[where]
    labels = {
        word for group in re.findall(r"(?:by|ignoring|on) \(([^)]*)\)", query) for word in re.split(r", *", group)
    }
    labels |= set(re.findall(r"[{,] *(\w+) *(?:=~|!=|!~|=)", query))
    names = set(re.findall(r"\bneuronpipe_\w+", query)) - labels
    assert names
    assert names <= series.keys(), names - series.keys()
    assert labels - _SCRAPERS_LABELS <= set().union(*(series[name] for name in names))


def test_every_series_is_shown_somewhere(series: dict[str, set[str]]) -> None:
    shown = " ".join(_queries().values())
    unshown = {name for name in series if not re.search(rf"\b{re.sub('_(bucket|count|sum)$', '', name)}", shown)}
    assert unshown == set()
