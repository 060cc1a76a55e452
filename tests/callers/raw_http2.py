"""A client of HTTP/2 that does what no gRPC client does, by the frames."""

import socket
import time
from collections.abc import Callable
from contextlib import suppress

import h2.config
import h2.connection
import h2.events
import h2.settings

# For what the server does by a limit of a second or two.
_LIMIT_S = 60.0
_HEAD = 9  # bytes of each frame's


def connect(address: str) -> socket.socket:
    """Connects to a server."""
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=_LIMIT_S)


def is_ended(connection: socket.socket) -> bool:
    """Returns whether the server ends a connection, after any bytes. Raises TimeoutError if it does not end."""
    with suppress(ConnectionResetError):
        while connection.recv(1 << 16):
            pass
    return True


class RawHttp2:
    """A connection over HTTP/2. `window`: how much of each response the client lets the server send."""

    def __init__(self, address: str, window: int = 65_535) -> None:
        self.socket = connect(address)
        self._rest, self._is_left = b"", False
        config = h2.config.H2Configuration(header_encoding="utf-8", validate_outbound_headers=False)
        self.frames = h2.connection.H2Connection(config)
        self.frames.local_settings = h2.settings.Settings(
            client=True, initial_values={h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window}
        )
        self.frames.initiate_connection()
        self.flush()

    def __enter__(self) -> "RawHttp2":
        return self

    def __exit__(self, *raised: object) -> None:
        self.socket.close()

    def flush(self) -> None:
        """Sends the frames that are due."""
        self.socket.sendall(self.frames.data_to_send())

    def open_call(self, path: str, *metadata: tuple[str, str]) -> int:
        """Sends the head of a call. Returns the number of its stream."""
        stream = self.frames.get_next_available_stream_id()
        head = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "test")]
        fields = [("te", "trailers"), ("content-type", "application/grpc"), *metadata]
        self.frames.send_headers(stream, [*head, *fields])
        self.flush()
        return stream

    def send_message(self, stream: int, message: bytes, *, ends: bool = True) -> None:
        """Sends a message of a call."""
        self.send_data(stream, b"\0" + len(message).to_bytes(4, "big") + message, ends=ends)

    def send_data(self, stream: int, data: bytes, *, ends: bool = True) -> None:
        """Sends bytes of a call, in frames and within windows as HTTP/2 wants them. Raises TimeoutError."""
        place = 0
        while place < len(data) or ends:
            window = min(self.frames.local_flow_control_window(stream), self.frames.max_outbound_frame_size)
            if not window and place < len(data):
                self.events(lambda event: isinstance(event, h2.events.WindowUpdated))
                continue
            part = data[place : place + window]
            place += len(part)
            self.frames.send_data(stream, part, end_stream=ends and place == len(data))
            self.flush()
            if place == len(data):
                return

    def events(self, is_enough: Callable[[h2.events.Event], bool]) -> list[h2.events.Event]:
        """Reads until an event is enough, or the server ends the connection. Returns all events."""
        events: list[h2.events.Event] = []
        ends_s = time.monotonic() + _LIMIT_S
        while time.monotonic() < ends_s:
            try:
                data = self.socket.recv(1 << 16)
            except ConnectionResetError:
                return events
            if not data:
                return events
            new = self._received(data)
            self.flush_if_open()
            events += new
            if any(map(is_enough, new)):
                return events
        raise TimeoutError

    def _received(self, data: bytes) -> list[h2.events.Event]:
        """Returns the events of received bytes.

        Behind a GOAWAY, h2 takes nothing, not even the ping with which a server asks whether the GOAWAY was read.
        """
        events: list[h2.events.Event] = []
        self._rest += data
        while len(self._rest) >= _HEAD and len(self._rest) >= (size := _HEAD + int.from_bytes(self._rest[:3], "big")):
            frame, self._rest = self._rest[:size], self._rest[size:]
            if not self._is_left:
                events += self.frames.receive_data(frame)
                self._is_left = any(isinstance(event, h2.events.ConnectionTerminated) for event in events)
        return events

    def flush_if_open(self) -> None:
        """Does the same as `flush`, but also if the server has just ended the connection."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self.flush()

    def status(self, stream: int) -> str:
        """Returns the gRPC status of a call, once it ends; "reset" if the stream or the connection was ended."""

        def ends(event: h2.events.Event) -> bool:
            return getattr(event, "stream_id", None) == stream and isinstance(
                event, h2.events.StreamEnded | h2.events.StreamReset
            )

        for event in self.events(ends):
            if (
                isinstance(event, h2.events.TrailersReceived | h2.events.ResponseReceived)
                and event.stream_id == stream
                and event.headers
            ):
                fields = {str(name): str(value) for name, value in event.headers}
                if "grpc-status" in fields:
                    return fields["grpc-status"]
        return "reset"
