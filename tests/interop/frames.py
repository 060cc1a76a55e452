"""Frames of HTTP/2 as bytes (RFC 9113), valid or not, and header blocks that need no table (RFC 7541)."""

from collections.abc import Iterable

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, END_HEADERS, PADDED, WITH_PRIORITY = 1, 4, 8, 32
ACK = 1
INITIAL_WINDOW_SIZE = 4
_HEAD_BYTES = 9


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    """A frame."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def settings(values: Iterable[tuple[int, int]] = ()) -> bytes:
    """A SETTINGS frame."""
    return frame(SETTINGS, payload=b"".join(key.to_bytes(2, "big") + value.to_bytes(4, "big") for key, value in values))


def window_update(stream: int, increment: int) -> bytes:
    """A WINDOW_UPDATE frame."""
    return frame(WINDOW_UPDATE, 0, stream, increment.to_bytes(4, "big"))


def reset(stream: int, code: int = 8) -> bytes:
    """A RST_STREAM frame, of CANCEL."""
    return frame(RST_STREAM, 0, stream, code.to_bytes(4, "big"))


def block(fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    """A header block: literal fields that are never put into the table."""
    return b"".join(b"\x00" + _string(name) + _string(value) for name, value in fields)


def call_fields(path: str, *metadata: tuple[bytes, bytes]) -> list[tuple[bytes, bytes]]:
    """The header fields of a gRPC call."""
    head = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", path.encode()), (b":authority", b"test")]
    return [*head, (b"te", b"trailers"), (b"content-type", b"application/grpc"), *metadata]


def message(data: bytes, flag: int = 0) -> bytes:
    """A message of gRPC."""
    return bytes([flag]) + len(data).to_bytes(4, "big") + data


def frames_in(data: bytes) -> tuple[list[tuple[int, int, int, bytes]], bytes]:
    """Kind, flags, stream and payload of each frame, and the bytes of one that is not whole."""
    found, place = [], 0
    while place + _HEAD_BYTES <= len(data):
        end = place + _HEAD_BYTES + int.from_bytes(data[place : place + 3], "big")
        if end > len(data):
            break
        stream = int.from_bytes(data[place + 5 : place + 9], "big") & 0x7FFFFFFF
        found.append((data[place + 3], data[place + 4], stream, data[place + _HEAD_BYTES : end]))
        place = end
    return found, data[place:]


def _string(data: bytes) -> bytes:
    """A string literal that is not Huffman coded (5.2)."""
    if len(data) < 127:
        return bytes([len(data)]) + data
    rest, size = len(data) - 127, b"\x7f"
    while rest >= 128:
        size += bytes([rest % 128 + 128])
        rest //= 128
    return size + bytes([rest]) + data
