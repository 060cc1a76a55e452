"""How a worker runs the asynchronous invocations of SageMaker's clients."""

import asyncio
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from neuronpipe.bulk.jobs.gateway import BulkGateway
from neuronpipe.bulk.jobs.invocation import Invoker
from neuronpipe.bulk.jobs.job import Invocation, JobProgress, StoredJob
from neuronpipe.bulk.jobs.objects import JobObjects
from neuronpipe.bulk.jobs.settings import WorkerSettings
from neuronpipe.platform.storage import Storage


async def _asked(endpoint: str, statuses: Iterable[bytes], folder: Path) -> list[bytes]:
    """Runs an invocation against a server that answers with each status in turn. Returns the first lines it got."""
    heads, answers = list[bytes](), iter(statuses)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append((await reader.readuntil(b"body")).split(b"\r\n")[0])
        writer.write(b"HTTP/1.1 %s\r\ncontent-length: 2\r\n\r\n[]" % next(answers))
        writer.close()

    (folder / "in").write_text("body")
    uris = [f"file://{folder}/{name}" for name in ("out", "failure")]
    invocation = Invocation(endpoint, f"file://{folder}/in", "application/json", "application/json", *uris)
    job = StoredJob.of("j", {b"limit": b"5", b"invocation": json.dumps(asdict(invocation)).encode()})
    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    settings = WorkerSettings.of(http_target=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    gateway = BulkGateway("127.0.0.1:1", None, max_in_flight=1)
    async with server:
        try:
            invoker = Invoker(gateway, JobObjects(Storage(), settings.max_input_bytes), settings)
            await invoker.run(job, JobProgress(), None)
        finally:
            await gateway.close()
    return heads


async def test_an_invocation_waits_while_a_proxy_reaches_no_gateway(tmp_path: Path) -> None:
    asked = await _asked("classifier", [b"502 Bad Gateway", b"503 Service Unavailable", b"200 OK"], tmp_path)
    assert asked == [b"POST /endpoints/classifier/invocations HTTP/1.1"] * 3
    assert (tmp_path / "out").read_text() == "[]"
    assert not (tmp_path / "failure").exists()


async def test_an_endpoint_may_have_any_name_that_an_alias_has(tmp_path: Path) -> None:
    asked = await _asked("caf\u00e9/au lait?", [b"200 OK"], tmp_path)
    assert asked == [b"POST /endpoints/caf%C3%A9/au%20lait%3F/invocations HTTP/1.1"]
