"""Jobs through a gateway, a real Redis and a worker: what their callers see."""

import concurrent.futures
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from google.longrunning import operations_pb2, operations_pb2_grpc

from demo.processes import ServiceProcess
from neuronpipe.api.v1.inference_pb2 import InferOutcome, InferRequest, InferResponse
from neuronpipe.api.v1.jobs_pb2 import JobResult
from neuronpipe.client import AlreadyExists, AsyncClient, Client, InvalidInput, JobNotFound, ModelNotFound, WrongTask
from tests.callers.requests import classify
from tests.models.repository import link_models
from tests.suite.commands import run
from tests.suite.waiting import until
from tests.systems.jobs import JobSystem, job_system

pytestmark = [pytest.mark.local_only, pytest.mark.sampled]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where jobs may read and write."""
    return tmp_path_factory.mktemp("objects")


@pytest.fixture(scope="module")
def jobs(fake_repository: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobSystem]:
    """A gateway that takes jobs."""
    models = link_models(tmp_path_factory.mktemp("jobs") / "repository", fake_repository, "classifier")
    options = ("--jobs-uris", f"file://{folder}", "--jobs-sagemaker-output", f"file://{folder}/async")
    with job_system(models, "--http-listen", "127.0.0.1:0", *options) as jobs:
        yield jobs


@pytest.fixture(scope="module")
def http(jobs: JobSystem) -> str:
    """The gateway's HTTP address."""
    return f"http://{jobs.gateway.wait_for('listening for HTTP')['address']}"


@pytest.fixture(scope="module")
def worker(jobs: JobSystem, http: str) -> Iterator[ServiceProcess]:
    """A worker."""
    with jobs.worker("--http-target", http) as worker:
        yield worker


@pytest.fixture
def client(jobs: JobSystem) -> Iterator[Client]:
    with Client(jobs.gateway.target) as client:
        yield client


@pytest.mark.usefixtures("worker")
def test_outcomes_are_in_the_order_of_the_inputs_and_an_input_fails_alone(client: Client) -> None:
    job = client.submit([classify("first"), classify("word " * 600), classify("third")])
    outcomes = job.wait(30)
    assert [outcome.WhichOneof("outcome") for outcome in outcomes] == ["response", "error", "response"]
    for number in (0, 2):
        assert outcomes[number].response.request_id == f"{job.name.removeprefix('jobs/')}/{number}"
    assert outcomes[0].response.result == client.infer(classify("first")).result
    known = job.status()
    assert known.result
    assert (known.result.succeeded, known.result.failed) == (2, 1)
    assert (known.metadata.inputs, known.metadata.completed_inputs, known.metadata.attempts) == (3, 3, 1)


@pytest.mark.usefixtures("worker")
async def test_the_asynchronous_client_submits_and_waits(jobs: JobSystem) -> None:
    async with AsyncClient(jobs.gateway.target) as client:
        job = await client.submit([classify("a")])
        (outcome,) = await job.wait(30)
        assert outcome.HasField("response")
        assert (await client.job(job.name).status()).is_done
        assert job.name in [listed.name for listed in await client.list_jobs()]


@pytest.mark.usefixtures("worker")
def test_submits_of_one_request_id_at_once_are_one_job(jobs: JobSystem, client: Client) -> None:
    with concurrent.futures.ThreadPoolExecutor(16) as threads:
        submitted = list(threads.map(lambda _: client.submit([classify("same")], request_id="once"), range(32)))
    assert len({job.name for job in submitted}) == 1
    submitted[0].wait(30)
    assert client.submit([classify("same")], request_id="once").name == submitted[0].name
    assert submitted[0].status().metadata.attempts == 1
    with pytest.raises(AlreadyExists, match="request_id"):
        client.submit([classify("other")], request_id="once")


def test_jobs_are_listed_in_pages_the_newest_first(jobs: JobSystem, client: Client) -> None:
    submitted = [client.submit([classify("a")], request_id=f"page-{number}") for number in range(5)]
    with grpc.insecure_channel(jobs.gateway.target) as channel:
        stub: Any = operations_pb2_grpc.OperationsStub(channel)
        first = stub.ListOperations(operations_pb2.ListOperationsRequest(page_size=3))
        rest = operations_pb2.ListOperationsRequest(page_size=2, page_token=first.next_page_token)
        second = stub.ListOperations(rest)
    listed = [operation.name for operation in (*first.operations, *second.operations)]
    assert listed == [job.name for job in reversed(submitted)]


def test_large_results_make_a_page_of_jobs_shorter(jobs: JobSystem, client: Client) -> None:
    submitted = [client.submit([classify("a")], request_id=f"large-{number}") for number in range(5)]
    outcome = InferOutcome(response=InferResponse(request_id="a" * (1 << 20)))
    result = b"r" + JobResult(outcomes=[outcome], succeeded=1).SerializeToString()
    for job in submitted:
        jobs.redis.ask("HSET", f"neuronpipe-jobs:job:{job.name.removeprefix('jobs/')}", "end", result)
    pages: list[list[str]] = []
    token = ""
    with grpc.insecure_channel(jobs.gateway.target) as channel:
        stub: Any = operations_pb2_grpc.OperationsStub(channel)
        while sum(map(len, pages)) < len(submitted):
            page = stub.ListOperations(operations_pb2.ListOperationsRequest(page_size=5, page_token=token))
            token = page.next_page_token
            pages.append([operation.name for operation in page.operations])
    assert [len(page) for page in pages[:2]] == [2, 2]
    assert [name for page in pages for name in page][:5] == [job.name for job in reversed(submitted)]
    for job in submitted:
        job.delete()


@pytest.mark.parametrize(
    ("request_", "kind", "problem"),
    [
        ({}, InvalidInput, "one of requests and input_uri"),
        ({"requests": [classify("a", model="none")]}, ModelNotFound, "none"),
        ({"requests": [InferRequest(model="classifier")]}, InvalidInput, r"requests\[0\].input"),
        ({"requests": [classify("a")], "work_limit_s": 3601}, InvalidInput, "3601, the limit is 3600"),
        ({"requests": [classify("a")], "time_to_live_s": 10**6}, InvalidInput, "the limit is 604800"),
        ({"requests": [classify("a")] * 1001}, InvalidInput, "1001 inputs, the limit is 1000"),
        ({"requests": [classify("a" * 10**6)] * 2}, InvalidInput, "as an input_uri"),
        ({"input_uri": "file:///etc/passwd"}, InvalidInput, "must be below file://"),
        ({"input_uri": "http://169.254.169.254/"}, InvalidInput, "must begin with s3://"),
        ({"requests": [classify("a")], "notification_url": "http://x/"}, InvalidInput, "jobs_notification_hosts"),
    ],
)
def test_a_job_that_must_fail_is_refused(
    client: Client, request_: dict[str, Any], kind: type[Exception], problem: str
) -> None:
    with pytest.raises(kind, match=problem):
        client.submit(**request_)


def test_a_task_that_a_model_does_not_have_is_refused(client: Client) -> None:
    request = InferRequest(model="classifier")
    request.input.fill_mask.text = "a [MASK]"
    with pytest.raises(WrongTask):
        client.submit([request])


def test_a_name_of_no_job_is_not_found(client: Client) -> None:
    for name in ("jobs/none", "none", "jobs/", "jobs/../x"):
        with pytest.raises(JobNotFound):
            client.job(name).status()


@pytest.mark.usefixtures("worker")
def test_objects_are_read_and_written_and_a_malformed_line_fails_alone(client: Client, folder: Path) -> None:
    lines = [
        '{"model": "classifier", "input": {"text_classification": {"text": "a"}}}',
        "{no json",
        "",
        '{"model": "classifier", "input": {"text_classification": {"text": "b"}}}',
    ]
    (folder / "in.jsonl").write_text("\n".join(lines), encoding="utf-8-sig")  # with a mark before, as of Windows
    job = client.submit(input_uri=f"file://{folder}/in.jsonl", output_uri=f"file://{folder}/new/out.jsonl")
    assert list(job.wait(30)) == []
    outcomes = [json.loads(line) for line in (folder / "new" / "out.jsonl").read_text().splitlines()]
    assert [next(iter(outcome)) for outcome in outcomes] == ["response", "error", "response"]
    assert "line 2 is no InferRequest" in outcomes[1]["error"]["message"]
    known = job.status()
    assert known.result
    assert (known.result.succeeded, known.result.failed) == (2, 1)


@pytest.mark.usefixtures("worker")
def test_a_job_whose_object_is_missing_fails(client: Client, folder: Path) -> None:
    job = client.submit(input_uri=f"file://{folder}/none.jsonl")
    with pytest.raises(InvalidInput, match=r"none\.jsonl is not there"):
        job.wait(30)


@pytest.mark.usefixtures("worker")
def test_jobs_over_http(http: str) -> None:
    with httpx.Client(base_url=http, timeout=60) as caller:
        body = {"requests": [{"model": "classifier", "input": {"text_classification": {"text": "a"}}}]}
        submitted = caller.post("/v1/jobs", json=body)
        name, location = submitted.json()["name"], submitted.headers["location"]
        assert (submitted.status_code, location) == (202, f"/v1/{name}")
        ended = caller.get(location, params={"wait_s": 30}).json()
        assert ended["done"] is True
        assert ended["metadata"]["state"] == "JOB_STATE_SUCCEEDED"
        (outcome,) = ended["response"]["outcomes"]
        assert outcome["response"]["result"]["text_classification"]["labels"]
        listed = caller.get("/v1/jobs", params={"page_size": 1}).json()["operations"]
        assert [operation["name"] for operation in listed] == [name]
        assert caller.get("/v1/jobs/none").status_code == 404


@pytest.mark.usefixtures("worker")
def test_sagemakers_asynchronous_invocations(http: str, folder: Path) -> None:
    (folder / "body.json").write_text('{"inputs": "a fine day"}')
    (folder / "broken.json").write_text('{"inputs": ')

    endpoint, json_type = f"{http}/endpoints/classifier", {"content-type": "application/json"}

    def invoke(name: str, id: str) -> tuple[Path, Path]:
        given = {"InputLocation": f"file://{folder}/{name}", "InferenceId": id, "RequestTTLSeconds": "60"}
        headers = {f"X-Amzn-SageMaker-{field}": value for field, value in given.items()}
        answer = httpx.post(f"{endpoint}/async-invocations", headers=json_type | headers, timeout=30)
        assert (answer.status_code, answer.json()) == (202, {"InferenceId": id})
        places = [answer.headers[f"x-amzn-sagemaker-{kind}location"] for kind in ("output", "failure")]
        output, failure = (Path(place.removeprefix("file://")) for place in places)
        return output, failure

    output, failure = invoke("body.json", "one")
    until(output.exists, "the output")
    body = (folder / "body.json").read_bytes()
    answer = httpx.post(f"{endpoint}/invocations", content=body, headers=json_type, timeout=30)
    assert json.loads(output.read_text()) == answer.json()
    assert not failure.exists()
    output, failure = invoke("broken.json", "two")
    until(failure.exists, "the failure")
    assert "body" in json.loads(failure.read_text())["error"]
    assert not output.exists()


@pytest.mark.usefixtures("worker")
def test_the_commands(jobs: JobSystem) -> None:
    def job(*words: str, code: int = 0) -> str:
        ran = run("job", *words)
        assert ran.returncode == code, ran.stderr
        return ran.stdout + ran.stderr

    target = ("--target", jobs.gateway.target)
    text = ("--model", "classifier", "--text", "a fine day")
    name = job("submit", *target, *text, "--request-id", "by-hand").strip()
    (line,) = job("wait", *target, name).splitlines()
    assert json.loads(line)["response"]["model"] == "classifier"
    assert f"{name}  succeeded  normal    1       1     1" in job("list", *target)
    assert job("submit", *target, *text, "--request-id", "by-hand", "--wait").splitlines() == [name, line]
    job("cancel", *target, name)
    assert "JOB_NOT_FOUND" in job("cancel", *target, "jobs/none", code=1)
    assert "--input-uri" in job("submit", *target, code=2)
    assert job("dead", "list", "--jobs-redis-url", jobs.redis.url).startswith("JOB ")
    assert "dead list" in job("dead", "retry", name, "--jobs-redis-url", jobs.redis.url, code=1)
