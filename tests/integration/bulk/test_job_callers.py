"""Jobs and those around them: receivers of notifications, tenants, traces, metrics."""

import base64
import hashlib
import hmac
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest

from demo.processes import ServiceProcess
from neuronpipe.api.v1.jobs_pb2 import SubmitInferenceRequest
from neuronpipe.api.v1.jobs_pb2_grpc import JobServiceStub
from neuronpipe.client import Client, JobNotFound, ModelNotFound, Overloaded
from neuronpipe.core.names import Attributes, Spans
from neuronpipe.gateway.callers.keys import create_key
from neuronpipe.rpc.client import KEY_VARIABLE
from tests.callers.metrics import metric, series_of
from tests.callers.requests import classify
from tests.models.repository import link_models
from tests.servers.collector import grpc_collector
from tests.servers.redis import redis_server
from tests.suite.waiting import until
from tests.systems.guarded_gateway import make_files
from tests.systems.jobs import JobSystem, job_system

pytestmark = [pytest.mark.local_only, pytest.mark.sampled]

_SECRET = b"a secret that is long enough"
_TENANTS = """
[tenants.search]
models = ["classifier"]
max_jobs = 2

[tenants.labels]
models = ["minilm"]

[tenants.workers]
acts_for_others = true

[tenants.others]
"""


@dataclass
class Receiver:
    """Answers with these statuses, one after the other, and then with the last one for ever."""

    port: int = 0
    statuses: list[int] = field(default_factory=lambda: [200])
    received: list[tuple[dict[str, str], bytes]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://localhost:{self.port}/hook"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    kept = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            kept.received.append(({name.lower(): value for name, value in self.headers.items()}, body))
            status = kept.statuses.pop(0) if len(kept.statuses) > 1 else kept.statuses[0]
            self.send_response(status)
            if status == 307:
                self.send_header("location", f"{kept.url}/elsewhere")
            self.send_header("content-length", "0")
            self.end_headers()

        def do_GET(self) -> None:
            raise AssertionError("the redirect was followed")

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        kept.port = server.server_port
        yield kept
        server.shutdown()


@pytest.fixture(scope="module")
def models(fake_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return link_models(tmp_path_factory.mktemp("jobs") / "repository", fake_repository, "classifier", "minilm")


@pytest.fixture(scope="module")
def jobs(models: Path) -> Iterator[JobSystem]:
    with job_system(models, "--jobs-notification-hosts", "localhost") as jobs:
        yield jobs


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("secret") / "secret"
    file.write_text(f"whsec_{base64.b64encode(_SECRET).decode()}\n")
    return file


def test_a_receiver_gets_a_signed_cloud_event_again_until_it_accepts(
    jobs: JobSystem, receiver: Receiver, secret: Path
) -> None:
    receiver.statuses = [500, 307, 204]
    networks = ("--notification-networks", "127.0.0.0/8,::1/128")
    with jobs.worker("--notification-secret", str(secret), *networks), Client(jobs.gateway.target) as client:
        job = client.submit([classify("a")], notification_url=receiver.url, request_id="told")
        job.wait(30)
        until(lambda: len(receiver.received) == 3, "three attempts")
        until(lambda: not jobs.redis.ask("ZCARD", "neuronpipe-jobs:notify"), "nobody is left to be told")
    headers, body = receiver.received[-1]
    event = json.loads(body)
    id = job.name.removeprefix("jobs/")
    assert headers["content-type"].startswith("application/cloudevents+json")
    assert {name: event[name] for name in ("specversion", "id", "source", "type", "subject")} == {
        "specversion": "1.0",
        "id": id,
        "source": "/neuronpipe/jobs",
        "type": "neuronpipe.job.succeeded",
        "subject": job.name,
    }
    assert event["data"] == {"name": job.name, "state": "succeeded", "request_id": "told", "inputs": 1}
    # https://github.com/standard-webhooks/standard-webhooks: what is signed is ID.TIMESTAMP.BODY
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    expected = base64.b64encode(hmac.new(_SECRET, signed, hashlib.sha256).digest()).decode()
    assert headers["webhook-signature"] == f"v1,{expected}"


def test_a_workers_metrics_say_what_waits_and_what_came_of_jobs(jobs: JobSystem) -> None:
    with jobs.worker("--metrics-listen", "127.0.0.1:0") as worker, Client(jobs.gateway.target) as client:
        client.submit([classify("a")]).wait(30)
        until(lambda: metric(worker, "neuronpipe_jobs_ended_total", "succeeded") > 0, "the end is counted")
        waiting = 'neuronpipe_jobs_waiting{neuronpipe_job_priority="normal"}'
        until(lambda: series_of(worker).get(waiting) == 0, "none waits")
        assert any(name.startswith("neuronpipe_job_wait_seconds_bucket") for name in series_of(worker))


def test_jobs_are_their_tenants_and_run_by_its_rights(models: Path, tmp_path: Path) -> None:
    files = make_files(tmp_path / "files", _TENANTS)
    keys = {name: create_key(files.keys, name, name) for name in ("workers", "others")}
    http = ("--http-listen", "127.0.0.1:0", "--open-services", "health,metrics")
    with (
        job_system(models, "--api-keys", str(files.keys), "--tenants", str(files.tenants), *http) as jobs,
        Client(jobs.gateway.target, api_key=files.search) as search,
        Client(jobs.gateway.target, api_key=files.labels) as labels,
    ):
        first, second = (search.submit([classify(text)], request_id=text) for text in "ab")
        with pytest.raises(Overloaded, match="2 jobs of tenant 'search' wait or run, the limit"):
            search.submit([classify("c")])
        with pytest.raises(ModelNotFound):
            labels.submit([classify("a")])
        with pytest.raises(JobNotFound):
            labels.job(first.name).status()
        with pytest.raises(JobNotFound):
            labels.job(first.name).cancel()
        assert list(labels.list_jobs()) == []
        # A worker whose tenant may not act for others runs nothing, and loses nothing.
        with _worker(jobs, keys["others"]) as worker:
            worker.wait_for("the gateway does not let this worker call for the tenant of a job")
            worker.stop()
        with _worker(jobs, keys["workers"]):
            assert [outcome.WhichOneof("outcome") for outcome in first.wait(60)] == ["response"]
            second.wait(60)
        address = f"http://{jobs.gateway.wait_for('listening for HTTP')['address']}/metrics"
        tokens = [name for name in series_of(address) if name.startswith("neuronpipe_tenant_tokens_total")]
        assert tokens == ['neuronpipe_tenant_tokens_total{neuronpipe_tenant="search"}']


def _worker(jobs: JobSystem, key: str) -> ServiceProcess:
    where = ("--jobs-redis-url", jobs.redis.url, "--target", jobs.gateway.target, "--grace-s", "0.2")
    return ServiceProcess("worker", *where, environment={KEY_VARIABLE: key})


def test_a_jobs_trace_is_linked_to_its_submitters(models: Path) -> None:
    with grpc_collector() as collector:
        exported = {
            "OTEL_TRACES_EXPORTER": "otlp",
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint,
            "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
            "OTEL_BSP_SCHEDULE_DELAY": "100",
        }
        with redis_server(is_durable=True) as redis:
            where = ("--jobs-redis-url", redis.url)
            with (
                ServiceProcess("all", "--repository", str(models), *where, environment=exported) as gateway,
                ServiceProcess("worker", *where, "--target", gateway.target, environment=exported) as worker,
                grpc.insecure_channel(gateway.wait_until_ready().target) as channel,
            ):
                worker.wait_until_ready()
                stub: Any = JobServiceStub(channel)
                trace_id, span_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
                parent = ("traceparent", f"00-{trace_id}-{span_id}-01")
                operation = stub.SubmitInference(SubmitInferenceRequest(requests=[classify("a")]), metadata=[parent])
                collector.wait_until(
                    lambda seen: {Spans.JOB, Spans.INFER} <= {span.name for span in seen.spans}, timeout_s=60
                )
    (job,) = [span for span in collector.spans if span.name == Spans.JOB]
    assert job.service == "worker"
    assert list(job.links) == [(trace_id, span_id)]
    assert job.trace_id != trace_id
    assert job.attributes[Attributes.JOB_ID] == operation.name.removeprefix("jobs/")
    (infer,) = [span for span in collector.spans if span.name == Spans.INFER]
    assert (infer.trace_id, infer.parent_id) == job.key
