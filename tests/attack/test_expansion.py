"""What is made of a request is bounded by its size: memory grows by four times its bytes, and a constant.

The requests are made from the descriptors of every method and from the types of every body, so that a new field is
covered by itself.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError
from pydantic import TypeAdapter

from neuronpipe.api.v1 import jobs_pb2, registry_pb2
from neuronpipe.bulk.jobs.http import job_http_handlers
from neuronpipe.core.errors import InvalidInput
from neuronpipe.doors.http.bodies import read_body
from neuronpipe.doors.http.huggingface_tasks import CONVERTERS
from neuronpipe.rpc.rpcs import Rpc
from tests.fuzz.expanding import expanding_bodies, expanding_messages
from tests.fuzz.system import targets
from tests.unit.doors.http.written_pipeline import ROUTES

_jobs: Any = None
_JOB_ROUTES = [route for route, _ in job_http_handlers(_jobs)]

pytestmark = pytest.mark.local_only

# So large that each shape without a limit would take many times the constant.
_MESSAGE_BYTES = 2 << 20
# Of many values about as much as the limit allows, and of few.
_BODY_BYTES = (900 << 10, 48 << 10)
_CONSTANT_BYTES = 48 << 20
_TRIM = ctypes.CDLL(None).malloc_trim

_METHODS: dict[str, MethodDescriptor] = {
    target.method.input_type.full_name: target.method for target in targets() if target.service == "gateway"
} | {
    method.input_type.full_name: method
    for file in (jobs_pb2, registry_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
_BODIES: dict[str, Any] = {
    **{route.path: route.takes for route in (*ROUTES, *_JOB_ROUTES) if route.takes and not route.is_raw},
    **{f"Hugging Face, {task}": converter.takes for task, converter in CONVERTERS.items()},
}


def _rss_bytes() -> int:
    _TRIM(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def _check(name: str, data: bytes, read: Callable[[bytes], Any]) -> None:
    before_bytes = _rss_bytes()
    made = None
    with suppress(InvalidInput, DecodeError):
        made = read(data)
    grown_bytes = int(Path("/proc/self/statm").read_text().split()[1]) * 4096 - before_bytes
    del made
    assert grown_bytes <= 4 * len(data) + _CONSTANT_BYTES, f"{name}: {len(data)} bytes became {grown_bytes}"


@pytest.mark.sampled
@pytest.mark.timeout(300)
@pytest.mark.parametrize("method", _METHODS.values(), ids=_METHODS)
def test_memory_of_a_message_is_bounded_by_its_bytes(method: MethodDescriptor) -> None:
    rpc = Rpc.of(method)
    for name, data in expanding_messages(method.input_type, _MESSAGE_BYTES):
        _check(name, data(), rpc.decode)


def _schema(takes: Any) -> Iterator[tuple[TypeAdapter[Any], Any]]:
    adapter: TypeAdapter[Any] = takes if isinstance(takes, TypeAdapter) else TypeAdapter(takes)
    yield adapter, adapter.json_schema()


@pytest.mark.sampled
@pytest.mark.timeout(300)
@pytest.mark.parametrize("takes", _BODIES.values(), ids=_BODIES)
def test_memory_of_a_body_is_bounded_by_its_bytes(takes: Any) -> None:
    ((adapter, schema),) = _schema(takes)
    for size_bytes in _BODY_BYTES:
        for name, data in expanding_bodies(schema, schema.get("$defs", {}), size_bytes):
            _check(name, data(), lambda data: read_body(adapter, data))
