"""Measures the memory of connections that were used once and are idle.

Run: python -m tests.interop.idle_connections [--connections 10000] [--security plain]
"""

import argparse
import asyncio
import json
import resource
import ssl
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.interop import frames
from tests.interop.echo_server import SERVICE
from tests.interop.run import PLAIN, SECURITIES, Server, make_tls, running_echo

_AT_ONCE = 50
# What is not the connections', but loaded with the first ones.
_FIRST = 200


async def _open(server: Server, tls: ssl.SSLContext | None) -> asyncio.StreamWriter:
    """A connection after a call."""
    host, _, port = server.process.target.rpartition(":")
    reader, writer = await asyncio.open_connection(
        host, int(port), ssl=tls, server_hostname="localhost" if tls else None
    )
    head = frames.block(frames.call_fields(f"/{SERVICE}/Echo"))
    writer.write(frames.PREFACE + frames.settings() + frames.frame(frames.SETTINGS, frames.ACK))
    writer.write(frames.frame(frames.HEADERS, frames.END_HEADERS, 1, head))
    writer.write(frames.frame(frames.DATA, frames.END_STREAM, 1, frames.message(b"a" * 200)))
    received = b""
    while not any(
        kind == frames.HEADERS and flags & frames.END_STREAM for kind, flags, *_ in frames.frames_in(received)[0]
    ):
        part = await reader.read(1 << 16)
        assert part, "the server has ended the connection"
        received += part
    return writer


async def measure(server: Server, count: int) -> dict[str, float]:
    """Opens connections, and looks at the server's memory."""
    tls = None
    if server.tls:
        tls = ssl.create_default_context(cafile=str(server.tls["ca"]))
        tls.set_alpn_protocols(["h2"])
        if "key" in server.tls:
            tls.load_cert_chain(server.tls["certificate"], server.tls["key"])
    turns = asyncio.Semaphore(_AT_ONCE)

    async def open_one() -> asyncio.StreamWriter:
        async with turns:
            return await _open(server, tls)

    writers = list(await asyncio.gather(*(open_one() for _ in range(_FIRST))))
    before_mib, began_s = server.rss_mib(), time.monotonic()
    writers += await asyncio.gather(*(open_one() for _ in range(count)))
    took_s, after_mib = time.monotonic() - began_s, server.rss_mib()
    cpu_s = server.cpu_s()
    await asyncio.sleep(5)
    idle_cpu_s = server.cpu_s() - cpu_s
    for writer in writers:
        writer.close()
    return {
        "connections": count,
        "server_mib": round(after_mib),
        "kib_each": round((after_mib - before_mib) * 1024 / count, 1),
        "opened_a_second": round(count / took_s),
        "idle_cpu": round(idle_cpu_s / 5, 3),
    }


def main() -> None:
    """Prints the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--security", choices=SECURITIES, default=PLAIN)
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    limits = ("--max-connections", str(2 * options.connections), "--max-connection-idle-s", "0")
    with TemporaryDirectory() as folder, running_echo(make_tls(options.security, Path(folder)), *limits) as server:
        figures = asyncio.run(measure(server, options.connections))
    print(json.dumps({"security": options.security} | figures))


if __name__ == "__main__":
    main()
