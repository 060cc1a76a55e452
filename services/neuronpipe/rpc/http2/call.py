"""One call at the server, from its head to its status."""

import asyncio
import base64
import contextlib
import time
from collections.abc import Iterable, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol
from urllib.parse import quote

from google.rpc.code_pb2 import CANCELLED, INTERNAL, RESOURCE_EXHAUSTED, UNIMPLEMENTED
from ngh2 import NGH2Error

from neuronpipe.core.deadlines import Deadlines
from neuronpipe.core.errors import DeadlineExceeded, NeuronpipeError
from neuronpipe.platform.process.receiving_budget import UNCOUNTED_BYTES, Claim
from neuronpipe.rpc.http2.stream import REFUSED_STREAM, Deflated, MessageStream
from neuronpipe.rpc.transport import CallEnd, Metadata, Method, ServerOptions, end_of

_HEAD = ((b":status", b"200"), (b"content-type", b"application/grpc"))
_OK = ((b"grpc-status", b"0"),)
# gRPC requires the status 415 for other content types, so HTTP clients get an HTTP answer.
_NOT_GRPC = ((b":status", b"415"), (b"content-type", b"text/plain"))
_NOT_GRPC_BODY = b"this port speaks gRPC: POST with the content-type application/grpc\n"
# Header fields that are not metadata. This server does not use te and user-agent.
_RESERVED = frozenset((b"te", b"content-type", b"user-agent", b"grpc-accept-encoding", b"grpc-message-type"))
_TIMEOUT_UNITS_S = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_MAX_TIMEOUT_DIGITS = 8
# Bytes that a value of binary metadata counts in addition to its own (RFC 9113, 6.5.2).
_VALUE_BYTES = 32
# Printable characters except the percent sign stay as they are (PROTOCOL-HTTP2.md, Status-Message).
_MESSAGE_CHARACTERS = " !\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~"
# Time for the first message of a refused call with a stream of messages.
_REFUSAL_PATIENCE_S = 0.1


class NotGrpc(Exception):
    """An HTTP request that is not gRPC."""


class CallCarrier(Protocol):
    """The interface of a connection for its calls; see the connection in server.py."""

    options: ServerOptions
    deadlines: Deadlines
    peer: str
    peer_names: tuple[str, ...]

    def has_ended(self, call: "Http2Call") -> None: ...
    def rest(self) -> None: ...
    def flush_if_alone(self) -> None: ...


@dataclass(slots=True, eq=False)
class Http2Call(MessageStream):
    """The ServerCall (rpc/transport.py) over HTTP/2. `refusal`: the end of the call, if its head decided it."""

    connection: CallCarrier = field(kw_only=True)
    metadata: Metadata = ()
    metadata_bytes: int = 0
    deadline_s: float | None = None
    method: Method | None = None
    context: Context | None = None
    task: asyncio.Task[None] | None = None
    claim: Claim | None = None
    refusal: CallEnd | None = None
    has_sent_head: bool = False
    _is_counted: bool = False
    _is_running: bool = False
    _arrival: int | None = None

    @property
    def peer(self) -> str:
        return self.connection.peer

    def peer_names(self) -> Sequence[str]:
        return self.connection.peer_names

    def read_head(self, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """Takes the head of the call, and returns its path. Raises CallEnd, and NotGrpc for another content type.

        Metadata beyond the limit is neither kept nor decoded; the door refuses the call.
        """
        path = method = content_type = b""
        max_bytes = self.connection.options.settings.max_header_bytes
        metadata: list[tuple[str, str | bytes]] = []
        for name, value in headers:
            if name[:1] == b":":
                if name == b":path":
                    path = value
                elif name == b":method":
                    method = value
                continue
            self.metadata_bytes += len(name) + len(value)
            if name == b"content-type":
                content_type = value
            elif name == b"grpc-timeout":
                self.deadline_s = time.monotonic() + _timeout_s(value)
            elif name == b"grpc-encoding":
                self.encoding = value
            elif name[-4:] == b"-bin":
                self.metadata_bytes += _VALUE_BYTES * value.count(b",")
                if self.metadata_bytes <= max_bytes:
                    metadata += [(name.decode("latin-1"), part) for part in _unpacked(value)]
            elif name not in _RESERVED and self.metadata_bytes <= max_bytes:
                metadata.append((name.decode("latin-1"), value.decode("latin-1")))
        if method != b"POST" or not (
            content_type == b"application/grpc" or content_type.startswith((b"application/grpc+", b"application/grpc;"))
        ):
            raise NotGrpc
        self.metadata = metadata
        return path.decode("latin-1")

    def stop_reading(self, error: Exception) -> None:
        self.error = error
        self.drop_received()
        self.wake_reader()

    def can_begin(self) -> bool:
        """Returns whether the received messages are enough to begin the answer."""
        return bool(self.method and self.method.takes_stream) or bool(self.messages) or self.is_ended

    @property
    def is_claiming(self) -> bool:
        """Whether the unread bytes of this call count in the receiving budget."""
        return self.buffered_bytes > 0 or self.unread_bytes > UNCOUNTED_BYTES

    def note_arrival(self) -> None:
        """Limits the memory of messages that arrive or wait to be read, and the time until the first message."""
        connection = self.connection
        in_flight = connection.options.in_flight
        if self._arrival is None and self.task is None:
            self._arrival = in_flight.arrivals.begin(self._arrives_too_slowly)
        if self.is_claiming:
            claim = self.claim = self.claim or Claim(str(id(connection)), self._refuse)
            if (size_bytes := self.buffered_bytes + self.unread_bytes) > claim.bytes:
                in_flight.budget.grow(claim, size_bytes)
        else:
            self.end_claim()

    def next_message(self) -> bytes:
        message = MessageStream.next_message(self)  # a class with slots that dataclass makes has no super()
        if self.claim and not self.is_claiming:
            self.end_claim()
        return message

    def _arrives_too_slowly(self, is_late: bool) -> None:
        in_flight = self.connection.options.in_flight
        if in_flight.refuses_arriving:
            self.refuse_stream()
        else:
            self._refuse(in_flight.too_slow(is_late))

    def _refuse(self, error: NeuronpipeError) -> None:
        if self.task and not self.task.done():
            self.stop_reading(error)
        else:
            self.finish(end_of(error))

    def end_claim(self) -> None:
        """Releases the claim on the receiving budget: the messages were read, or never will be."""
        if self.claim:
            self.connection.options.in_flight.budget.release(self.claim)
            self.claim = None

    def end_arrival(self) -> None:
        """Ends the wait for the first message: it has come, or never will."""
        if self._arrival is not None:
            self.connection.options.in_flight.arrivals.remove(self._arrival)
            self._arrival = None

    async def inflate(self, message: bytes, window_bits: int) -> bytes | None:
        in_flight, limit_bytes = self.connection.options.in_flight, self.max_message_bytes
        return await in_flight.inflate(self.connection.peer, message, window_bits, limit_bytes)

    def accept(self, method: Method) -> None:
        """Passes the call to a method, which counts it. Raises CallEnd."""
        self.context = copy_context()
        self.method = method
        self.context.run(method.accept, self)
        self._is_counted = True

    def begin(self) -> None:
        """Starts the task that answers the call."""
        self.end_arrival()
        self.task = asyncio.get_running_loop().create_task(self._answer(), context=self.context)

    async def _answer(self) -> None:
        method = self.method
        assert method  # noqa: S101 (it was accepted)
        self._is_running = True
        try:
            request = None
            if not method.takes_stream:
                if self.error:  # the budget refused the last bytes
                    raise self.error
                if self.messages:
                    request = self.next_message()
                    if self.messages or self.buffered_bytes or self._size_bytes >= 0:
                        raise self._excess()
                    self.drop_received()
                    if isinstance(request, Deflated):
                        request = await self.inflated(request)
                else:
                    self.check_end()
            message = await method.answer(self, request)
            if message is not None and not (self.is_closed or self.has_sent_end):
                self._queue(message)
                if not self.has_room():
                    self.outbox.note_written(self)
                    await self.wait_for_room()
            self._end(_OK)
            self.connection.flush_if_alone()
        except CallEnd as end:
            self.finish(end)
        except asyncio.CancelledError:
            self.finish(CallEnd(CANCELLED, "the server has ended the call"))
            raise
        except NGH2Error:  # the stream has just ended
            return
        except Exception as fault:
            self.finish(end_of(fault))
        finally:
            self._uncount()

    def _excess(self) -> CallEnd:
        """Returns the end of a call with too many messages: UNIMPLEMENTED by grpc's doc/statuscodes.md, or INTERNAL if
        the last message is incomplete.
        """
        if self.is_ended and not self.messages:
            return CallEnd(INTERNAL, "the last message is incomplete")
        return CallEnd(UNIMPLEMENTED, "this method takes one message, and more came")

    def ignore(self) -> None:
        """Ends a call whose one message is being answered, because the caller sends more."""
        if self._is_running and self.task and not (self.task.done() or self.has_sent_end or self.error):
            self.finish(self._excess())
            self.task.cancel()

    async def send(self, message: bytes) -> None:
        if self.is_closed or self.has_sent_end:
            raise asyncio.CancelledError
        try:
            self._queue(message)
        except NGH2Error:  # the stream has just ended
            raise asyncio.CancelledError from None
        self.outbox.note_written(self)
        if not self.has_room():
            await self.wait_for_room()

    def _queue(self, message: bytes) -> None:
        """Queues a message. Before the first message it queues the head of the answer. Raises NGH2Error."""
        if not self.has_sent_head:
            self.has_sent_head = True
            self.outbox.engine.send_response(self.number, _HEAD)
        self.put(message)

    def finish(self, end: CallEnd) -> None:
        """Ends the call with a status."""
        if self.is_closed or self.has_sent_end:
            return
        if end.code == RESOURCE_EXHAUSTED:
            self.connection.rest()
        trailers = [(b"grpc-status", b"%d" % end.code)]
        if end.message:
            trailers.append((b"grpc-message", quote(end.message, safe=_MESSAGE_CHARACTERS).encode()))
        self._end([*trailers, *(_packed(name, value) for name, value in end.trailers)])

    def _end(self, trailers: Sequence[tuple[bytes, bytes]]) -> None:
        if self.is_closed or self.has_sent_end:
            return
        self._end_sending()
        try:
            if self.has_sent_head:
                self.outbox.engine.send_trailers(self.number, trailers)
            else:
                self.outbox.engine.send_response(self.number, (*_HEAD, *trailers), end_stream=True)
        except NGH2Error:  # the stream has just ended
            return
        self.connection.has_ended(self)

    def refuse(self, end: CallEnd) -> None:
        """Refuses the call after its headers, and drops its body.

        For a stream, the status waits for the caller's first message, or for `_REFUSAL_PATIENCE_S`: grpcio's
        asynchronous client reports INTERNAL for a call that ends before the client has written.
        """
        if self.is_ended or not (self.method and self.method.takes_stream):
            self.finish(end)
            return
        self.ignores_data, self.refusal = True, end
        self.connection.deadlines.add(self, time.monotonic() + _REFUSAL_PATIENCE_S, partial(self.finish, end))

    def refuse_stream(self) -> None:
        """Resets the stream by REFUSED_STREAM: the call was not processed, and clients repeat it by themselves."""
        self._end_sending()
        self.outbox.reset(self.number, REFUSED_STREAM)

    def answer_http(self) -> None:
        """Tells an HTTP client that this port speaks gRPC."""
        self._end_sending()
        with contextlib.suppress(NGH2Error):
            self.outbox.engine.send_response(self.number, _NOT_GRPC)
            self.outbox.engine.send_data(self.number, _NOT_GRPC_BODY, end_stream=True)
        self.connection.has_ended(self)

    def _end_sending(self) -> None:
        self.has_sent_end = True
        self.drop_received()
        self._forget()

    def expire(self) -> None:
        """Ends the call because its deadline has passed."""
        self.finish(end_of(DeadlineExceeded("the deadline passed before the result was ready")))
        if self.task and not self.task.done():
            self.task.cancel()

    def close(self) -> None:
        MessageStream.close(self)
        if not self.has_sent_end:
            self.drop_received()
            self._forget()
        if self.task and not self.task.done():
            self.task.cancel()
        # The frames of a cancelled task refer to this call. Together with connection and buffers, both would wait for
        # the garbage collector.
        self.task = None

    def _forget(self) -> None:
        """Ends all waits for the caller."""
        if self.deadline_s is not None or self.refusal:
            self.connection.deadlines.remove(self)
        self.end_arrival()
        if self.claim:
            self.end_claim()
        if not self._is_running:  # a task that is cancelled before it runs does not reach its `finally`
            self._uncount()

    def _uncount(self) -> None:
        if self._is_counted and self.method:
            self._is_counted = False
            self.method.done(self)


def _timeout_s(value: bytes) -> float:
    """Returns the seconds of a grpc-timeout. Raises CallEnd."""
    digits, unit_s = value[:-1], _TIMEOUT_UNITS_S.get(value[-1:])
    if unit_s is None or not digits.isdigit() or len(digits) > _MAX_TIMEOUT_DIGITS:
        raise CallEnd(INTERNAL, "grpc-timeout: must be up to eight digits and one of H, M, S, m, u, n")
    return int(digits) * unit_s


def _unpacked(value: bytes) -> Iterable[bytes]:
    """Yields the decoded values of a field of binary metadata, which may hold several. Raises CallEnd."""
    for part in map(bytes.strip, value.split(b",")):
        try:
            yield base64.b64decode(part.rstrip(b"=") + b"=" * (-len(part.rstrip(b"=")) % 4), validate=True)
        except ValueError as error:
            raise CallEnd(INTERNAL, "a value of binary metadata is not Base64") from error


def _packed(name: str, value: str | bytes) -> tuple[bytes, bytes]:
    return name.encode(), base64.b64encode(value).rstrip(b"=") if isinstance(value, bytes) else value.encode()
