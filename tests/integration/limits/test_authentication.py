"""Authentication at both doors, with the clients that people have."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cohere
import grpc
import httpx
import huggingface_hub
import openai
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from demo.processes import ServiceProcess, four_processes
from neuronpipe.client import AsyncClient, Client, ModelNotFound, Unauthenticated
from neuronpipe.gateway.callers.keys import create_key, revoke_keys
from neuronpipe.rpc.client import check_health
from tests.servers.token_issuer import Issuer
from tests.suite.commands import output, run
from tests.suite.waiting import until
from tests.systems.guarded_gateway import Guarded, fails_with, guarded_server, make_files

pytestmark = [pytest.mark.local_only, pytest.mark.sampled]

_REFUSAL = "no valid API key, token or client certificate came with the call"
_TEXT = "Ann lives in a house in Paris."


@pytest.fixture(scope="module")
def guarded(http_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    files = make_files(tmp_path_factory.mktemp("files"))
    options = ("--kept-traces", "10", "--metrics-listen", "127.0.0.1:0", "--open-services", "health")
    with guarded_server(http_repository, files, *options) as guarded:
        yield guarded


@pytest.fixture
def own(http_repository: Path, tmp_path: Path) -> Iterator[Guarded]:
    """One whose files the test changes."""
    with guarded_server(http_repository, make_files(tmp_path / "files")) as guarded:
        yield guarded


def _client(guarded: Guarded, key: str) -> Client:
    return Client(guarded.target, api_key=key, retries=False)


def _send(channel: Any, path: str, message: bytes = b"") -> None:
    channel.unary_unary(path)(message, timeout=10)


def test_a_key_opens_the_grpc_door(guarded: Guarded) -> None:
    with _client(guarded, guarded.files.search) as client:
        assert client.embed("minilm", _TEXT).shape == (384,)


@pytest.mark.parametrize("key", ["rsa", "ec"])
def test_a_token_opens_the_grpc_door(guarded: Guarded, key: str) -> None:
    with _client(guarded, guarded.files.issuer.sign(key)) as client:
        assert client.embed("minilm", _TEXT).shape == (384,)


async def test_no_rpc_is_answered_without_a_key(guarded: Guarded) -> None:
    async with AsyncClient(guarded.target, api_key="", retries=False) as client:
        for call in (
            *(client.embed("minilm", _TEXT), client.infer_batch([]), anext(client.infer_stream([]))),
            *(client.list_models(), client.get_model("minilm")),
        ):
            with pytest.raises(Unauthenticated):
                await call


def test_traces_need_a_key(guarded: Guarded) -> None:
    with grpc.insecure_channel(guarded.target) as channel, pytest.raises(grpc.RpcError) as raised:
        _send(channel, "/neuronpipe.api.v1.TraceService/GetTrace")
    assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_health_is_open(guarded: Guarded) -> None:
    assert check_health(guarded.target, None, 10) == "neuronpipe.api.v1.InferenceService"
    for path in "/health", "/ping":
        assert _get(guarded.server.url + path)[0] == 200


def _reflect(target: str, key: str = "") -> list[str]:
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    metadata = (("authorization", f"Bearer {key}"),) if key else ()
    with grpc.insecure_channel(target) as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        (response,) = stub.ServerReflectionInfo(iter([request]), metadata=metadata, timeout=10)
    return [service.name for service in response.list_services_response.service]


def test_reflection_needs_a_key(guarded: Guarded) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        _reflect(guarded.target)
    assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert "neuronpipe.api.v1.InferenceService" in _reflect(guarded.target, guarded.files.search)


def test_what_is_open_is_what_the_setting_says(fake_repository: Path, tmp_path: Path) -> None:
    key = create_key(tmp_path / "keys", "a", "a")
    options = ("--repository", str(fake_repository), "--api-keys", str(tmp_path / "keys"))
    ports = ("--http-listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0")
    with ServiceProcess("all", *options, *ports, "--open-services", "reflection,metrics") as process:
        process.wait_until_ready()
        assert _get(f"http://{process.wait_for('metrics')['address']}/metrics")[0] == 200
        # They have a port of their own: not where callers come from anywhere.
        assert _get(f"http://{process.wait_for('listening for HTTP')['address']}/metrics")[0] == 401
        assert "grpc.health.v1.Health" in _reflect(process.target)
        with grpc.insecure_channel(process.target) as channel, pytest.raises(grpc.RpcError) as raised:
            _send(channel, "/grpc.health.v1.Health/Check")
        assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with Client(process.target, api_key=key) as client:  # whose channel watches health without a key
            assert client.list_models()


def test_metrics_need_a_key_where_the_setting_says_so(guarded: Guarded) -> None:
    url = f"http://{guarded.server.process.wait_for('metrics')['address']}/metrics"
    assert _get(url)[0] == 401
    status, page = _get(url, guarded.files.search)
    assert status == 200
    assert 'neuronpipe_authentication_calls_total{neuronpipe_outcome="missing"}' in page
    assert 'neuronpipe_file_loaded{neuronpipe_file="--tenants"} 1.0' in page


def _get(url: str, key: str = "") -> tuple[int, str]:
    answer = httpx.get(url, headers={"authorization": f"Bearer {key}"} if key else {}, timeout=10)
    return answer.status_code, answer.text


@pytest.mark.parametrize("kind", ["key", "token"])
def test_openai(guarded: Guarded, kind: str) -> None:
    key = guarded.files.search if kind == "key" else guarded.files.issuer.sign()
    with openai.OpenAI(base_url=f"{guarded.server.url}/v1", api_key=key, max_retries=0) as client:
        assert len(client.embeddings.create(model="minilm", input=_TEXT).data[0].embedding) == 384
        assert [model.id for model in client.models.list()] == ["minilm", "reranker"]
        assert client.models.retrieve("minilm").id == "minilm"
        for call in client.models.retrieve, lambda name: client.embeddings.create(model=name, input=_TEXT):
            with pytest.raises(openai.NotFoundError) as not_theirs:
                call("classifier")
            with pytest.raises(openai.NotFoundError) as unknown:
                call("nothing")
            assert str(not_theirs.value).replace("classifier", "nothing") == str(unknown.value)


def test_openai_with_another_key(guarded: Guarded) -> None:
    with openai.OpenAI(base_url=f"{guarded.server.url}/v1", api_key="sk-nothing", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as raised:
            client.embeddings.create(model="minilm", input=_TEXT)
        assert raised.value.code == "invalid_api_key"
        assert raised.value.response.headers["www-authenticate"] == "Bearer"
        with pytest.raises(openai.AuthenticationError):
            client.models.list()


def test_cohere(guarded: Guarded) -> None:
    documents = ["A dog ran.", "A cat sat."]
    with cohere.ClientV2(api_key=guarded.files.search, base_url=guarded.server.url) as client:
        assert len(client.rerank(model="reranker", query="Who sat?", documents=documents).results) == 2
    stranger = cohere.ClientV2(api_key="nothing", base_url=guarded.server.url)
    with stranger, pytest.raises(cohere.UnauthorizedError):
        stranger.rerank(model="reranker", query="Who sat?", documents=documents)


def test_hugging_face(guarded: Guarded) -> None:
    url = f"{guarded.server.url}/models/classifier"
    client = huggingface_hub.InferenceClient(model=url, token=guarded.files.labels)
    assert client.text_classification(_TEXT)
    with pytest.raises(huggingface_hub.errors.HfHubHTTPError, match="401"):
        huggingface_hub.InferenceClient(model=url, token="nothing").text_classification(_TEXT)
    with pytest.raises(huggingface_hub.errors.HfHubHTTPError, match="404"):
        huggingface_hub.InferenceClient(model=url, token=guarded.files.search).text_classification(_TEXT)


def test_a_model_of_another_tenant_does_not_exist(guarded: Guarded) -> None:
    with _client(guarded, guarded.files.labels) as client:
        assert [model.name for model in client.list_models()] == ["classifier"]
        for call in client.get_model, lambda name: client.embed(name, _TEXT):
            with pytest.raises(ModelNotFound) as not_theirs:
                call("minilm")
            with pytest.raises(ModelNotFound) as unknown:
                call("nothing")
            assert not_theirs.value.message.replace("minilm", "nothing") == unknown.value.message
            assert "reranker" not in unknown.value.message


def test_the_open_inference_protocol_tells_a_tenant_of_its_own_models_only(guarded: Guarded) -> None:
    stats = f"{guarded.server.url}/v2/models/stats"
    names = [stat["name"] for stat in json.loads(_get(stats, guarded.files.labels)[1])["model_stats"]]
    assert names == ["classifier"]
    models = f"{guarded.server.url}/v2/models"
    others, missing = (_get(f"{models}/{name}", guarded.files.labels) for name in ("minilm", "nosuch"))
    assert others[0] == missing[0] == 404
    assert others[1].replace("minilm", "nosuch") == missing[1]


def test_the_console_loads_without_a_key_and_shows_nothing_without_one(guarded: Guarded) -> None:
    url = guarded.server.url
    assert [_get(f"{url}/{path}")[0] for path in ("", "console/api.js", "v2/health/live")] == [200] * 3
    assert [_get(f"{url}/{path}")[0] for path in ("console/state", "console/live", "metrics")] == [401] * 3
    models = json.loads(_get(f"{url}/console/state", guarded.files.labels)[1])["models"]
    assert [model["name"] for model in models] == ["classifier"]


def test_a_new_key_is_taken_and_a_revoked_one_is_not(own: Guarded) -> None:
    new = create_key(own.files.keys, "search", "eve")
    with _client(own, new) as client, _client(own, own.files.search) as old:
        old.embed("minilm", _TEXT)
        until(lambda: not fails_with(Unauthenticated, lambda: client.embed("minilm", _TEXT)))
        revoke_keys(own.files.keys, lambda key: key.name == "ann")
        until(lambda: fails_with(Unauthenticated, lambda: old.embed("minilm", _TEXT)))
        client.embed("minilm", _TEXT)


def test_new_signing_keys_are_taken_and_broken_ones_are_not(own: Guarded) -> None:
    old, new = own.files.issuer, Issuer()
    own.files.jwks.write_bytes(new.jwks())
    with _client(own, old.sign()) as former, _client(own, new.sign()) as latter:
        until(lambda: not fails_with(Unauthenticated, latter.list_models))
        assert fails_with(Unauthenticated, former.list_models)  # also where it was known before
        own.files.jwks.write_text('{"keys": [')
        own.server.process.wait_for("changed files cannot be used; their last good content stays in use")
        latter.list_models()


def test_the_commands_read_a_key_from_the_environment_or_a_file(guarded: Guarded, tmp_path: Path) -> None:
    command = ("models", "--target", guarded.target)
    file = tmp_path / "key"
    file.write_text(f"{guarded.files.labels}\n")
    without = run(*command)
    assert (without.returncode, without.stderr) == (1, f"neuronpipe: UNAUTHENTICATED: {_REFUSAL}\n")
    for options, key in ([], guarded.files.labels), (["--api-key-file", str(file)], "nothing"):
        shown = run(*command, *options, environment={"NEURONPIPE_API_KEY": key})
        assert "classifier" in shown.stdout
        assert "minilm" not in shown.stdout


def test_load_and_trace_take_the_key(guarded: Guarded, tmp_path: Path) -> None:
    target = ["--target", guarded.target, "--model", "classifier"]
    trace = ["trace", *target, "--json", '{"text_classification": {"text": "a"}}', "--otlp", str(tmp_path / "otlp")]
    for arguments in ["load", *target, "--duration", "1", "--concurrency", "2"], trace:
        output(*arguments, environment={"NEURONPIPE_API_KEY": guarded.files.labels})
    spans = json.loads((tmp_path / "otlp").read_text())
    assert '"neuronpipe.tenant"' in json.dumps(spans)
    assert '"labels"' in json.dumps(spans)


def test_no_secret_and_no_text_is_logged(guarded: Guarded) -> None:
    tokens = guarded.files.issuer.sign(), guarded.files.issuer.sign(exp=1)
    for key in (guarded.files.search, *tokens, "np_0123456789abcdef_wrongsecret"):
        with _client(guarded, key) as client:
            fails_with(Unauthenticated, lambda client=client: client.embed("minilm", _TEXT))  # type: ignore[misc]
    assert "a caller is not authenticated" in guarded.log
    for secret in (guarded.files.search.split("_", 2)[2], *tokens, "wrongsecret", _TEXT):
        assert secret not in guarded.log


def test_four_processes_authenticate_at_the_gateway(fake_repository: Path, tmp_path: Path) -> None:
    key = create_key(tmp_path / "keys", "a", "a")
    environment = {"NEURONPIPE_GATEWAY_API_KEYS": str(tmp_path / "keys")}
    with four_processes(fake_repository, environment=environment) as processes:
        target = processes["gateway"].target
        with Client(target, api_key=key, retries=False) as client:
            assert client.classify("classifier", _TEXT)
        with Client(target, api_key="", retries=False) as client:
            assert fails_with(Unauthenticated, lambda: client.classify("classifier", _TEXT))
