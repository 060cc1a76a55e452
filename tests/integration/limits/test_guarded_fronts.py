"""Front processes with mTLS, keys and tenants: each of them knows its callers, and follows the files."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from demo.processes import ServiceProcess
from neuronpipe.api.v1.inference_pb2_grpc import InferenceServiceStub
from neuronpipe.api.v1.models_pb2 import ListModelsRequest
from neuronpipe.api.v1.models_pb2_grpc import ModelServiceStub
from neuronpipe.gateway.callers.keys import create_key
from tests.callers.requests import classify, embed
from tests.integration.processes.test_tls import _shown
from tests.servers.certificates import replace
from tests.servers.tls_files import Deployment
from tests.suite.waiting import happens

pytestmark = [pytest.mark.local_only, pytest.mark.sampled]

# So many connections all go to one of two processes once in 2 ** 15 times.
_CONNECTIONS = 16
_TENANTS = """
[tenants.search]
models = ["minilm"]
certificates = ["spiffe://tests/caller"]

[tenants.labels]
models = ["classifier"]
"""


@dataclass(frozen=True)
class _Service:
    process: ServiceProcess
    deployment: Deployment
    tenants: Path
    key: str

    @asynccontextmanager
    async def channels(self) -> AsyncIterator[Sequence[grpc.aio.Channel]]:
        """Connections with the caller's certificate, which both front processes get some of."""
        files = self.deployment.files()
        credentials = grpc.ssl_channel_credentials(
            *(Path(file or "").read_bytes() for file in (files.ca, files.key, files.certificate))
        )
        async with AsyncExitStack() as stack:
            yield [
                await stack.enter_async_context(
                    grpc.aio.secure_channel(
                        self.process.target, credentials, [("grpc.use_local_subchannel_pool", number + 1)]
                    )
                )
                for number in range(_CONNECTIONS)
            ]

    async def models(self, *metadata: tuple[str, str]) -> list[set[str]]:
        """What each connection's caller may use."""
        async with self.channels() as channels:
            answers = await asyncio.gather(
                *(ModelServiceStub(channel).ListModels(ListModelsRequest(), metadata=metadata) for channel in channels)
            )
        return [{model.name for model in answer.models} for answer in answers]


@pytest.fixture(scope="module")
def service(fake_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Service]:
    folder = tmp_path_factory.mktemp("guarded")
    deployment, tenants, keys = Deployment(folder / "tls"), folder / "tenants.toml", folder / "keys"
    tenants.write_text(_TENANTS)
    key = create_key(keys, "labels", "ann")
    options = ["--repository", str(fake_repository), "--api-keys", str(keys), "--tenants", str(tenants)]
    with ServiceProcess("all", "--front-processes", "2", *options, environment=deployment.environment()) as process:
        yield _Service(process.wait_until_ready(), deployment, tenants, key)


async def test_a_client_certificate_names_the_tenant(service: _Service) -> None:
    assert await service.models() == [{"minilm"}] * _CONNECTIONS
    async with service.channels() as channels:
        await InferenceServiceStub(channels[0]).Infer(embed("a text"))
        for channel in channels:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await InferenceServiceStub(channel).Infer(classify("a text"))
            assert refused.value.code() == grpc.StatusCode.NOT_FOUND


async def test_a_key_goes_before_the_certificate(service: _Service) -> None:
    assert await service.models(("authorization", f"Bearer {service.key}")) == [{"classifier"}] * _CONNECTIONS


async def test_a_wrong_key_is_no_reason_to_take_the_certificate(service: _Service) -> None:
    async with service.channels() as channels:
        for channel in channels:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await InferenceServiceStub(channel).Infer(
                    embed("a text"), metadata=(("authorization", "Bearer np_wrong"),)
                )
            assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED


async def test_all_show_a_certificate_that_has_changed(service: _Service) -> None:
    new, files = service.deployment.renew("all"), service.deployment.files()
    await happens(lambda: {_shown(service.process.target, files) for _ in range(_CONNECTIONS)} == {new.number})
    assert await service.models() == [{"minilm"}] * _CONNECTIONS


async def test_all_follow_the_file_of_tenants(service: _Service) -> None:
    replace(service.tenants, _TENANTS.replace('["minilm"]', '["answerer"]').encode())

    async def are_theirs() -> bool:
        return await service.models() == [{"answerer"}] * _CONNECTIONS

    await happens(are_theirs)
