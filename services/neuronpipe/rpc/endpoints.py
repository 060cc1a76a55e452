"""The gateway's side of a stage's stream: connections to every process behind a target."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from google.protobuf.message import DecodeError
from google.rpc.code_pb2 import Code

from neuronpipe.core.calls import told_error
from neuronpipe.core.errors import InternalError, InvalidInput, Unavailable
from neuronpipe.core.items import ModelKey, StageItem
from neuronpipe.core.logs import log, log_warning
from neuronpipe.core.status import from_status
from neuronpipe.core.streams import Outcome, StageResponse
from neuronpipe.platform.tls import LoadedTls, WatchedTls
from neuronpipe.rpc.codecs import read_models, read_problems, read_unloaded, write_models
from neuronpipe.rpc.http2.client import ClientCall, Http2Channel
from neuronpipe.rpc.items import LARGE_BYTES, StageRpc
from neuronpipe.rpc.transport import CallEnd

# The time between two resolutions of a target, so that new processes get work.
_RESOLVE_EVERY_S = 5.0
# The same while no process is there: requests may be held for the first one.
_RESOLVE_ABSENT_S = 1.0
# The number of complete answers in a row, a minute's, that miss an address before it is retired. For a name with many
# addresses, a DNS server returns only some at a time. If each answer has four in ten of them, an address is missing
# from all twelve once in 460 minutes; with one in two, once in 4,100 minutes.
_MAX_ABSENCES = 12
# The pause after a stream that a server refused or ended. gRPC itself waits for a server that is down.
_PAUSE_S = 0.1
# The pause if the server is not a stage of neuronpipe, or has a fault.
_REFUSED_PAUSE_S = 5.0

# The names of google.rpc.Code by their numbers, and those of a server that starts, stops or has gone.
_CODES: Mapping[int, str] = {number: name for name, number in Code.items()}
_USUAL_ENDS = ("UNAVAILABLE", "CANCELLED")


class StageStream:
    """A stream to one process of a stage; see core/streams.py."""

    def __init__(self, rpc: StageRpc, call: ClientCall, first: Any, retired: asyncio.Event) -> None:
        """`first`: the message with which the process said that it accepts items."""
        self._rpc = rpc
        self._call = call
        self._max_message_bytes = 0
        # The status with which the process has ended the stream.
        self.end: CallEnd | None = None
        self.has_ended = False
        self.models = self._announced(first)
        self.problems: Mapping[ModelKey, str] = read_problems(first.announcement)
        self.unloaded: Mapping[ModelKey, bool] = read_unloaded(first.announcement)
        self.retired = retired

    async def send(
        self, items: Sequence[tuple[int, StageItem]], abandoned_item_ids: Sequence[int], size_bytes: int
    ) -> Sequence[Outcome]:
        """Sends items; large ones are serialized in a thread. Returns the errors of items that cannot be sent.

        Raises Unavailable.
        """
        if size_bytes >= LARGE_BYTES:
            messages, refused = await asyncio.to_thread(self._serialize, items, abandoned_item_ids)
        else:
            messages, refused = self._serialize(items, abandoned_item_ids)
        await self._write(messages)
        return refused

    async def tell_needed(self, models: frozenset[ModelKey]) -> None:
        """Says which models items may be sent for. Raises Unavailable."""
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
        """The next message. Raises Unavailable."""
        try:
            data = await self._call.read()
            response = None if data is None else self._rpc.response_class.FromString(data)
        except (CallEnd, DecodeError) as end:
            self.end, self.has_ended = end if isinstance(end, CallEnd) else None, True
            raise Unavailable("the stream has ended") from end
        if response is None:
            self.has_ended = True
            raise Unavailable("the stream has ended")
        outcomes = [(outcome.item_id, self._outcome(outcome)) for outcome in response.outcomes]
        kept_item_ids = response.draining.item_ids if response.HasField("draining") else None
        if (models := self._announced(response)) is None:  # as in nearly all
            return StageResponse(outcomes, kept_item_ids)
        announcement = response.announcement
        return StageResponse(outcomes, kept_item_ids, models, read_problems(announcement), read_unloaded(announcement))

    def _serialize(
        self, items: Sequence[tuple[int, StageItem]], abandoned_item_ids: Sequence[int]
    ) -> tuple[list[bytes], list[Outcome]]:
        """Serializes the items into as few messages as the process accepts, nearly always one.

        Also returns the errors of items that fit into none.
        """
        message = self._rpc.request_class(abandoned_item_ids=abandoned_item_ids)
        refused: list[Outcome] = []
        for item_id, item in items:
            try:
                written = message.items.add()
                self._rpc.codec.write_item(item, written)
                written.context.item_id = item_id
            except Exception as error:
                del message.items[-1]
                refused.append((item_id, told_error(error, item.call)))
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
        return (
            self._rpc.codec.read_value(outcome)
            if kind
            else InternalError(f"the {self._rpc.service_name} service answered with nothing")
        )

    def _announced(self, response: Any) -> frozenset[ModelKey] | None:
        if not response.HasField("announcement"):
            return None
        self._max_message_bytes = response.announcement.max_message_bytes
        return read_models(response.announcement)


async def follow_endpoints(
    rpc: StageRpc,
    target: str,
    serve: Callable[[StageStream], Awaitable[None]],
    tls: WatchedTls | None = None,
) -> None:
    """Keeps a stream to every process behind the target until cancelled, and passes each open one to `serve`.

    `target`: "HOST:PORT", with every address that the host's name has, or several of these, separated by commas; or
    "unix:PATH". `tls`: the gateway's side of encrypted connections; where its files change, new streams take the place
    of the old.
    """
    followed: dict[str, _Address] = {}
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
            for address, one in list(followed.items()):
                if address in addresses:
                    one.absences = 0
                elif not unresolved:  # otherwise the old ones are the best guess
                    one.absences += 1
                if one.absences >= _MAX_ABSENCES:
                    log("a stage's address is gone", rpc=rpc.path, address=address)
                    followed.pop(address).retire()
            for address, server_name in addresses.items():
                before = followed.get(address)
                if before is None or (tls and before.tls is not tls.value):
                    one = _Address(rpc, address, server_name, serve, tls.value if tls else None, before)
                    followed[address] = one
                    one.following = group.create_task(one.follow())
            is_served = any(one.is_served for one in followed.values())
            await asyncio.sleep(_RESOLVE_EVERY_S if is_served else _RESOLVE_ABSENT_S)


class _Address:
    """An address of a target, over connections with the same certificates."""

    following: "asyncio.Task[None]"

    def __init__(
        self,
        rpc: StageRpc,
        address: str,
        server_name: str,
        serve: Callable[[StageStream], Awaitable[None]],
        tls: LoadedTls | None,
        before: "_Address | None",
    ) -> None:
        """`before`: the same address with older certificates, which is retired once this one is served."""
        # Answers in a row that did not name it.
        self.absences = 0
        self.tls = tls
        self._rpc = rpc
        self._address = address
        self._server_name = server_name
        self._serve = serve
        self.is_served = False
        self._retired = asyncio.Event()
        self._before = before
        if before and not before.is_served:  # what could not be opened has nothing to end
            before.following.cancel()
            self._before = before._before

    def retire(self) -> None:
        """Ends the stream once its process has answered all items in flight."""
        self._retired.set()
        if not self.is_served:
            self.following.cancel()
        self._retire_before()

    def _retire_before(self) -> None:
        if self._before:
            self._before.retire()
            self._before = None

    async def follow(self) -> None:
        """Keeps a stream to the address until it is retired."""
        channel = Http2Channel(self._address, self.tls, self._server_name)
        try:
            while not self._retired.is_set():
                call = await channel.open_call(self._rpc.path)
                try:
                    first = await call.read()
                    if first is not None:  # the service's sign that it takes items
                        await self._serve_stream(call, self._rpc.response_class.FromString(first))
                except DecodeError:
                    pass  # what it says is not for us; it is asked again
                except CallEnd as end:
                    if _CODES.get(end.code) not in _USUAL_ENDS:
                        log_warning(
                            "a stage refuses its stream",
                            rpc=self._rpc.path,
                            address=self._address,
                            code=_CODES.get(end.code, str(end.code)),
                        )
                        await asyncio.sleep(_REFUSED_PAUSE_S)
                finally:
                    call.cancel()
                await asyncio.sleep(_PAUSE_S)
        finally:
            await channel.close()

    async def _serve_stream(self, call: ClientCall, first: Any) -> None:
        self.is_served = True
        log("a stage's stream is open", rpc=self._rpc.path, address=self._address)
        self._retire_before()  # serving begins before the other can end: there is no moment without a stream
        stream = StageStream(self._rpc, call, first, self._retired)
        try:
            await self._serve(stream)
        finally:
            self.is_served = False
        if stream.has_ended:
            code, reason = (_CODES.get(stream.end.code, ""), stream.end.message) if stream.end else ("OK", "")
            say = log if code in ("OK", *_USUAL_ENDS) else log_warning
            say("a stage's stream has ended", rpc=self._rpc.path, address=self._address, code=code, reason=reason)


async def resolve(target: str) -> tuple[dict[str, str], dict[str, str]]:
    """The gRPC addresses of a target, each with the name that its server's certificate must have, empty for a socket's
    path; and the parts of the target that cannot be resolved now, each with the reason.
    """
    loop = asyncio.get_running_loop()
    addresses: dict[str, str] = {}
    unresolved: dict[str, str] = {}
    for one in map(str.strip, target.split(",")):
        if one.startswith("unix:"):
            addresses[one] = ""
            continue
        host, _, port = one.removeprefix("dns:///").rpartition(":")
        try:
            found: Sequence[Any] = await loop.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        except OSError as error:
            unresolved[one] = error.strerror or type(error).__name__
            continue
        for family, _, _, _, where in found:
            address = f"ipv6:[{where[0]}]:{where[1]}" if family == socket.AF_INET6 else f"ipv4:{where[0]}:{where[1]}"
            addresses[address] = f"{host}:{port}"
    return addresses, unresolved
