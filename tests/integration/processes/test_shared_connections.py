"""Calls that end together leave the others of their connection alone, with gRPC's own client and every process."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import pytest

from demo.processes import four_processes
from neuronpipe.api.v1.inference_pb2 import InferResponse
from tests.callers.requests import classify
from tests.systems.pipelines import make_slow

pytestmark = [pytest.mark.local_only, pytest.mark.sampled]

_INFER = "/neuronpipe.api.v1.InferenceService/Infer"
_OTHERS, _CALLS = 10, 800


@pytest.mark.parametrize("how", ["deadlines", "cancelled"])
async def test_calls_that_end_together_leave_the_others_of_their_connection_alone(
    fake_repository: Path, tmp_path: Path, how: str
) -> None:
    async def code(call: Any) -> str:
        try:
            await call
            return "OK"
        except grpc.aio.AioRpcError as error:
            return str(error.code().name)
        except asyncio.CancelledError:
            return "CANCELLED"

    with four_processes(make_slow(fake_repository, tmp_path / "slow")) as processes:
        options = [("grpc.enable_retries", 0)]
        async with grpc.aio.insecure_channel(processes["gateway"].target, options=options) as channel:
            infer: Any = channel.unary_unary(_INFER, response_deserializer=InferResponse.FromString)
            request = classify("A fine day.").SerializeToString()
            others = [infer(request, timeout=60) for _ in range(_OTHERS)]
            await asyncio.sleep(0.2)
            some = [infer(request, timeout=1.0 if how == "deadlines" else 60) for _ in range(_CALLS)]
            await asyncio.sleep(0.8)
            if how == "cancelled":
                for call in some:
                    call.cancel()
            ended = Counter(await asyncio.gather(*map(code, some)))
            codes = Counter(await asyncio.gather(*map(code, others)))
    assert codes == {"OK": _OTHERS}
    # Where a process has no room or time for a call, it says so.
    assert ended.keys() <= {"CANCELLED", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"}
