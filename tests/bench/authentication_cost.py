"""What authentication costs a call: CPU time of `serve all` with the fake back end, without it, with an API key, and
with tokens, in turns.

Run: python -m tests.bench.authentication_cost REPOSITORY [--requests 2000] [--rounds 5] [--callers 8]
"""

import asyncio
import tempfile
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from demo.processes import ServiceProcess
from neuronpipe.api.v1.inference_pb2 import InferRequest
from neuronpipe.api.v1.tasks_pb2 import TaskInput, TextClassificationInput
from neuronpipe.client import AsyncClient
from neuronpipe.gateway.callers.keys import create_key
from tests.bench.costs import CostOptions, Kind, measure_costs, parse_options
from tests.servers.token_issuer import AUDIENCE, ISSUER, Issuer

_TEXT = "The weather report promises a fine day."


async def _ask(client: AsyncClient, request: InferRequest, number: int) -> None:
    await client.infer(request)


async def _measure(options: CostOptions) -> None:
    issuer, input = Issuer(), TaskInput(text_classification=TextClassificationInput(text=_TEXT))
    request = InferRequest(model="classifier", input=input)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        key = create_key(folder / "keys", "a", "a")
        (folder / "jwks").write_bytes(issuer.jwks())
        (folder / "tenants.toml").write_text("[tenants.a]\n[tenants.search]\n")
        repository = ("--repository", str(options.repository))
        tokens = ("--jwks", str(folder / "jwks"), "--jwt-issuer", ISSUER, "--jwt-audience", AUDIENCE)
        files = ("--api-keys", str(folder / "keys"), "--tenants", str(folder / "tenants.toml"))
        plain = stack.enter_context(ServiceProcess("all", *repository))
        guarded = stack.enter_context(ServiceProcess("all", *repository, *tokens, *files))
        secrets = {"plain": "", "key": key, "ES256": issuer.sign("ec"), "RS256": issuer.sign("rsa")}
        kinds = {}
        for name, secret in secrets.items():
            process = guarded if secret else plain
            target = process.wait_until_ready().target
            client = await stack.enter_async_context(AsyncClient(target, api_key=secret))
            kinds[name] = Kind([process.pid], partial(_ask, client, request))
        await measure_costs(kinds, options.requests, options.rounds, options.callers)


if __name__ == "__main__":
    asyncio.run(_measure(parse_options(__doc__)))
