"""The gateway's side of a stage's stream: connections to every process behind a target."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import DecodeError
from google.rpc.code_pb2 import Code

from neuronpipe.core.addresses import telling_wrong_labels
from neuronpipe.core.calls import to_caller_error
from neuronpipe.core.errors import InternalError, InvalidInput, Unavailable
from neuronpipe.core.items import ModelKey, StageItem
from neuronpipe.core.logs import log, log_warning
from neuronpipe.core.status import from_status
from neuronpipe.core.streams import Outcome, ProcessModels, StageResponse
from neuronpipe.platform.process.background import run_beside, wait_for_event
from neuronpipe.platform.process.in_flight import LARGE_BYTES
from neuronpipe.platform.tls import LoadedTls, WatchedTls
from neuronpipe.rpc.codecs import read_announcement, write_models
from neuronpipe.rpc.http2.client import ClientCall, Http2Channel
from neuronpipe.rpc.items import StageRpc
from neuronpipe.rpc.transport import CallEnd

# The time between two resolutions of a target, so that new processes get work.
_RESOLVE_EVERY_S = 5.0
# The same time while the target has no process: requests may wait for the first process.
_RESOLVE_ABSENT_S = 1.0
# Complete answers in a row, one minute's, that miss an address before the address is retired. For a name with many
# addresses, a DNS server returns only some at a time. If each answer contains four in ten of them, an address is
# missing from all twelve once in 460 minutes; with one in two, once in 4,100 minutes.
_MAX_ABSENCES = 12
# The pause after a server refused or ended a stream. gRPC itself waits for a server that is down.
_PAUSE_S = 0.1
# The pause if the server is not a stage of neuronpipe, or has a fault.
_REFUSED_PAUSE_S = 5.0
# Limit of logged reasons: some contain a number that the server chooses.
_MAX_REASONS = 8

# The names of google.rpc.Code by their numbers, and the names that a server sends when it starts, stops or vanishes.
_CODES: Mapping[int, str] = {number: name for name, number in Code.items()}
_USUAL_ENDS = ("UNAVAILABLE", "CANCELLED")


class StageStream:
    """A stream to one process of a stage; see core/streams.py."""

    def __init__(self, rpc: StageRpc, call: ClientCall, first: Any, retired: asyncio.Event, address: str) -> None:
        """`first`: the first message, by which the process shows that it accepts items."""
        self._rpc, self._call, self.retired, self.address = rpc, call, retired, address
        # The status with which the process ended the stream.
        self.end: CallEnd | None = None
        # `is_draining`: the process stops, and refuses new streams.
        self.has_ended = self.is_draining = False
        self._max_message_bytes = 0
        self.models = self._announced(first) or ProcessModels()

    async def send(
        self, items: Sequence[tuple[int, StageItem]], abandoned_item_ids: Sequence[int], size_bytes: int
    ) -> Sequence[Outcome]:
        """Sends items. Returns the errors of items that cannot be sent. Raises Unavailable.

        Large items are serialized in a thread.
        """
        if size_bytes >= LARGE_BYTES:
            messages, refused = await asyncio.to_thread(self._serialize, items, abandoned_item_ids)
        else:
            messages, refused = self._serialize(items, abandoned_item_ids)
        await self._write(messages)
        return refused

    async def tell_needed(self, models: frozenset[ModelKey]) -> None:
        """Tells the process for which models it may get items. Raises Unavailable."""
        message = self._rpc.request_class()
        message.needed.SetInParent()
        write_models(models, message.needed)
        await self._write([message.SerializeToString()])

    async def _write(self, messages: Sequence[bytes]) -> None:
        try:
            for message in messages:
                await self._call.write(message)
        except CallEnd as end:
            raise Unavailable("the stream has ended") from end

    async def receive(self) -> StageResponse:
        """Returns the next message. Raises Unavailable."""
        try:
            data = await self._call.read()
            response = None if data is None else self._rpc.response_class.FromString(data)
        except (CallEnd, DecodeError) as end:
            self.end, self.has_ended = end if isinstance(end, CallEnd) else None, True
            raise Unavailable("the stream has ended") from end
        if response is None:
            self.has_ended = True
            raise Unavailable("the stream has ended")
        # A slice, because in upb iterating over a repeated field takes longer.
        outcomes = [(outcome.item_id, self._outcome(outcome)) for outcome in response.outcomes[:]]
        kept_item_ids = response.draining.item_ids if response.HasField("draining") else None
        self.is_draining |= kept_item_ids is not None
        return StageResponse(outcomes, kept_item_ids, self._announced(response))

    def _serialize(
        self, items: Sequence[tuple[int, StageItem]], abandoned_item_ids: Sequence[int]
    ) -> tuple[list[bytes], list[Outcome]]:
        """Serializes the items into as few messages as the process accepts, nearly always into one message.

        Also returns the errors of items that exceed a whole message.
        """
        message, write_item = self._rpc.request_class(), self._rpc.codec.write_item
        if abandoned_item_ids:
            message.abandoned_item_ids.extend(abandoned_item_ids)
        refused: list[Outcome] = []
        for item_id, item in items:
            try:
                written = message.items.add()
                write_item(item, written)
                written.context.item_id = item_id
            except Exception as error:
                del message.items[-1]
                refused.append((item_id, to_caller_error(error, item.call)))
        data = message.SerializeToString()
        if not self._max_message_bytes or len(data) <= self._max_message_bytes or not message.items:
            return [data] if data else [], refused
        if len(items) > 1:
            half = len(items) // 2
            first, second = self._serialize(items[:half], abandoned_item_ids), self._serialize(items[half:], ())
            return first[0] + second[0], first[1] + second[1]
        problem = (
            f"{len(data)} bytes for the {self._rpc.service_name} service, which takes {self._max_message_bytes} at most"
        )
        messages, _ = self._serialize((), abandoned_item_ids)
        return messages, [(items[0][0], InvalidInput("input", problem))]

    def _outcome(self, outcome: Any) -> Any:
        kind = outcome.WhichOneof("outcome")
        if kind == "error":
            return from_status(outcome.error)
        if kind:
            return self._rpc.codec.read_value(outcome)
        return InternalError(f"the {self._rpc.service_name} service answered with nothing")

    def _announced(self, response: Any) -> ProcessModels | None:
        if not response.HasField("announcement"):
            return None  # the usual case
        self._max_message_bytes = response.announcement.max_message_bytes
        return read_announcement(response.announcement)


async def follow_endpoints(
    rpc: StageRpc, target: str, serve: Callable[[StageStream], Awaitable[None]], tls: WatchedTls | None = None
) -> None:
    """Keeps a stream to every process behind the target until cancelled, and passes each open stream to `serve`.

    `target`: "unix:PATH", or "HOST:PORT" for every address of the host's name; commas separate several targets. `tls`:
    the gateway's files for encrypted connections. New streams replace old streams when these files change, and when a
    process, or a proxy before it, asks for another connection.
    """
    endpoints: dict[str, _FollowedEndpoint] = {}
    leaving = asyncio.Event()
    unresolved: Mapping[str, str] = {}
    async with asyncio.TaskGroup() as group:
        while True:
            if tls:
                tls.look()
            unresolved_before = unresolved
            addresses, unresolved = await resolve(target)
            for name, problem in unresolved.items():
                if name not in unresolved_before:
                    log_warning("a target cannot be resolved", target=name, problem=problem)
            for address, endpoint in list(endpoints.items()):
                if address in addresses:
                    endpoint.absences = 0
                elif not unresolved:  # otherwise the old addresses are the best guess
                    endpoint.absences += 1
                if endpoint.absences >= _MAX_ABSENCES:
                    log("a stage's address is gone", rpc=rpc.path, address=address)
                    endpoints.pop(address).retire()
            for address, server_name in addresses.items():
                before = endpoints.get(address)
                if before is None or before.is_leaving or (tls and before.tls is not tls.value):
                    files = tls.value if tls else None
                    endpoint = _FollowedEndpoint(
                        rpc, address, server_name, serve, tls=files, before=before, leaving=leaving
                    )
                    endpoints[address] = endpoint
                    endpoint.following = group.create_task(endpoint.follow())
            is_served = any(endpoint.is_served for endpoint in endpoints.values())
            leaving.clear()
            if await wait_for_event(leaving, _RESOLVE_EVERY_S if is_served else _RESOLVE_ABSENT_S):
                await asyncio.sleep(_PAUSE_S)  # some proxies ask for a new connection at each connection's first call


@dataclass(eq=False)
class _FollowedEndpoint:
    """An address of a target, with its connection, which is made again when it was lost.

    `before`: the same address on an older connection, retired once this object serves. `leaving`: set when this object
    must also be replaced. `absences`: answers in a row that did not contain the address.
    """

    following: "asyncio.Task[None]" = field(init=False)
    rpc: StageRpc
    address: str
    server_name: str
    serve: Callable[[StageStream], Awaitable[None]]
    tls: LoadedTls | None
    before: "_FollowedEndpoint | None"
    leaving: asyncio.Event

    def __post_init__(self) -> None:
        self.absences = 0
        self.is_served = self.is_leaving = False
        # Reasons that were logged since the process became unreachable; each is logged once.
        self._logged_reasons: set[str] = set()
        self._retired = asyncio.Event()
        if self.before and not self.before.is_served:  # a stream that never opened has nothing to end
            self.before.following.cancel()
            self.before = self.before.before

    def retire(self) -> None:
        """Ends the stream once its process has answered all items in flight."""
        self._retired.set()
        if not self.is_served:
            self.following.cancel()
        self._retire_before()

    def _retire_before(self) -> None:
        if self.before:
            self.before.retire()
            self.before = None

    async def follow(self) -> None:
        """Keeps a stream to the address until it is retired."""
        channel = Http2Channel(self.address, self.tls, self.server_name, self._note_failure)
        try:
            while not self._retired.is_set():
                call = await channel.open_call(self.rpc.path)
                try:
                    first = await call.read()
                    if first is not None:  # the service's sign that it takes items
                        await self._serve_stream(call, self.rpc.response_class.FromString(first))
                except DecodeError:
                    self._note_failure("its first message is not a stage's")
                except CallEnd as end:
                    code = _CODES.get(end.code, str(end.code))
                    if code not in _USUAL_ENDS:
                        log_warning("a stage refuses its stream", rpc=self.rpc.path, address=self.address, code=code)
                        await asyncio.sleep(_REFUSED_PAUSE_S)
                    elif not call.has_grpc_status:  # a process that starts or stops says so
                        self._note_failure(end.message)
                finally:
                    call.cancel()
                await asyncio.sleep(_PAUSE_S)
        finally:
            await channel.close()

    def _note_failure(self, reason: str) -> None:
        """Logs the reason why there is no stream. Each reason is logged once, until a stream is open."""
        if reason not in self._logged_reasons and len(self._logged_reasons) < _MAX_REASONS:
            self._logged_reasons.add(reason)
            log_warning("a stage cannot be reached", rpc=self.rpc.path, address=self.address, reason=reason)

    async def _serve_stream(self, call: ClientCall, first: Any) -> None:
        self.is_served = True
        self._logged_reasons.clear()
        log("a stage's stream is open", rpc=self.rpc.path, address=self.address)
        self._retire_before()  # the new stream serves before the old stream can end
        stream = StageStream(self.rpc, call, first, self._retired, self.address)
        try:
            async with run_beside(self._watch_connection(call, stream)):
                await self.serve(stream)
        finally:
            self.is_served = self.is_leaving = False  # the next stream has its own connection
        if stream.has_ended:
            code, reason = (_CODES.get(stream.end.code, ""), stream.end.message) if stream.end else ("OK", "")
            log_end = log if code in ("OK", *_USUAL_ENDS) else log_warning
            log_end("a stage's stream has ended", rpc=self.rpc.path, address=self.address, code=code, reason=reason)

    async def _watch_connection(self, call: ClientCall, stream: StageStream) -> None:
        """Notes when the address needs another connection. A process that stops accepts none."""
        await call.connection.goaway_received.wait()
        if not stream.is_draining:
            self.is_leaving = True
            self.leaving.set()


async def resolve(target: str) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the gRPC addresses of a target with their server names, and its unresolved parts with the reasons.

    A server name is the name that the server's certificate must contain; it is empty for the path of a socket.
    """
    loop = asyncio.get_running_loop()
    addresses: dict[str, str] = {}
    unresolved: dict[str, str] = {}
    for part in map(str.strip, target.split(",")):
        if part.startswith("unix:"):
            addresses[part] = ""
            continue
        host, _, port = part.removeprefix("dns:///").rpartition(":")
        try:
            with telling_wrong_labels():
                resolved: Sequence[Any] = await loop.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        except OSError as error:
            unresolved[part] = error.strerror or type(error).__name__
            continue
        for family, _, _, _, socket_address in resolved:
            ip, number, *_ = socket_address
            address = f"ipv6:[{ip}]:{number}" if family == socket.AF_INET6 else f"ipv4:{ip}:{number}"
            addresses[address] = f"{host}:{port}"
    return addresses, unresolved
