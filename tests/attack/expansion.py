"""Requests of which more is made than their bytes: of a few kilobytes on the wire, gigabytes once."""

import asyncio
import io
import json
import struct
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import grpc
import httpx
from PIL import Image

from neuronpipe.api.v1.inference_pb2 import InferBatchRequest, InferRequest
from neuronpipe.api.v1.tasks_pb2 import ChatMessage, GenerationOptions, TaskInput, TextGenerationInput
from tests.attack.frame import SYSTEMS, Attacked, attack
from tests.callers.raw_http2 import RawHttp2, connect
from tests.callers.requests import embed
from tests.fuzz.expanding import field_of
from tests.interop import frames
from tests.models.repository import link_models
from tests.systems.http_server import post

_BODY_MIB, _MESSAGE_MIB = 8, 64
_LIMIT_S = 60.0
_API = "/neuronpipe.api.v1.InferenceService"


@cache
def _gzip(data: bytes) -> bytes:
    packer = zlib.compressobj(9, wbits=16 + zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


@cache
def _list_of(one: bytes, size_mib: int = _BODY_MIB) -> bytes:
    return b"[" + b",".join([one] * ((size_mib << 20) // (len(one) + 1) - 64)) + b"]"


async def _post(
    server: Attacked, path: str, body: bytes, *, is_packed: bool = True, media_type: str = "application/json"
) -> None:
    """Sends a body, until its answer comes."""
    headers = {"content-type": media_type, "authorization": f"Bearer {server.keys.get('mallory', '')}"}
    if is_packed:
        body, headers = _gzip(body), headers | {"content-encoding": "gzip"}
    async with httpx.AsyncClient(base_url=f"http://{server.http}", timeout=_LIMIT_S) as client:
        response = await client.post(path, content=body, headers=headers)
    assert response.status_code in (200, 400, 413, 429), response.text[:500]


async def _call(server: Attacked, path: str, data: bytes, *, is_packed: bool = True) -> None:
    """Calls a method once."""
    options: Sequence[tuple[str, int]] = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    compression = grpc.Compression.Gzip if is_packed else grpc.Compression.NoCompression
    async with grpc.aio.insecure_channel(server.target, options=options, compression=compression) as channel:
        method: Any = channel.unary_unary(path)
        call = method(data, timeout=_LIMIT_S, metadata=server.metadata)
        code, details = await call.code(), await call.details()
    assert code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED), f"{code}: {details}"


@attack("H1", "23 KB of gzip that are a JSON list of millions of empty lists", sends_mib=_BODY_MIB, is_quick=True)
async def empty_lists(server: Attacked) -> None:
    await _post(server, "/v1/embeddings", b'{"model":"minilm","input":' + _list_of(b"[]") + b"}")


@attack("H1", "the same in 24 MB, beyond the limit of a body", sends_mib=_BODY_MIB)
async def empty_lists_beyond_the_limit(server: Attacked) -> None:
    await _post(server, "/v1/embeddings", b'{"model":"minilm","input":' + _list_of(b"[]", 3 * _BODY_MIB) + b"}")


@attack("H1", "JSON lists of millions of empty objects, to four protocols in turn", sends_mib=_BODY_MIB)
async def empty_objects(server: Attacked) -> None:
    objects = _list_of(b"{}")
    for path, head in (
        ("/v1/chat/completions", b'{"model":"minilm","messages":'),
        ("/rerank", b'{"query":"a","documents":'),
        ("/models/classifier", b'{"inputs":'),
        ("/v2/models/minilm/infer", b'{"inputs":'),
    ):
        await _post(server, path, head + objects + b"}")


@attack("H1", "JSON with as many numbers as are allowed, again and again", sends_mib=_BODY_MIB, is_quick=True)
async def as_many_numbers_as_are_allowed(server: Attacked) -> None:
    numbers = b"[" + b",".join([b"1"] * 500_000) + b"]"
    await _post(server, "/embed", b'{"inputs":' + numbers + b"}")


@attack("H1", "JSON with as many objects as are allowed, again and again", sends_mib=_BODY_MIB)
async def as_many_objects_as_are_allowed(server: Attacked) -> None:
    objects = b"[" + b",".join([b'{"text":"a"}'] * 20_000) + b"]"
    await _post(server, "/rerank", b'{"query":"a","documents":' + objects + b"}")


@contextmanager
def _expanding(repository: Path, folder: Path) -> Iterator[Attacked]:
    """The guarded system, with models whose tokenizers normalize texts by NFKC, one of images, and one of chats."""
    from tests.models.architectures import make_source
    from tests.models.compiling import compile_model  # takes seconds to import
    from tests.models.decoders import make_writer

    models = link_models(folder / "models", repository, "minilm", "classifier", "viewer")
    for task, name in (("sentence_embedding", "unigram"), ("rerank", "unigram-reranker")):
        source = make_source(folder / name, "XLM-R", task)
        compile_model(source, models, task, name=name, backend="fake")
    make_writer(folder / "writer")
    (models / "writer").symlink_to(folder / "writer" / "repository" / "writer")
    with SYSTEMS["guarded"](models, folder) as server:
        yield server


SYSTEMS["expanding"] = _expanding
_to_what_expands = partial(attack, system="expanding", sends_mib=1)
# Half of a tokenizer's container, for one image at a time, and what the library keeps beside it.
_to_the_viewer = partial(_to_what_expands, constant_mib=300)


def _nested(depth: int, opened: bytes = b"[", closed: bytes = b"]") -> bytes:
    return opened * depth + b"0" + closed * depth


@_to_what_expands("N7", "JSON that is nested 600 and 1,000 deep in each body, over every protocol")
async def nested_bodies(server: Attacked) -> None:
    for deep in (_nested(600), _nested(1000, b'{"a":', b"}"), _nested(300, b'[{"a":', b"}]")):
        for path, head in (
            ("/v1/chat/completions", b'{"model":"writer","messages":[{"role":"user","content":"a","x":'),
            (
                "/v1/chat/completions",
                b'{"model":"writer","messages":[{"role":"user","content":"a"}],"tools":[{"type":"function","function":{"name":"a","x":',
            ),
            ("/v1/responses", b'{"model":"writer","input":[{"role":"user","content":"a","x":'),
            ("/v1/completions", b'{"model":"writer","prompt":"a","guided_json":[{"x":'),
            ("/v1/embeddings", b'{"model":"minilm","input":"a","x":[{"x":'),
            ("/rerank", b'{"query":"a","documents":["a"],"x":[{"x":'),
            ("/models/classifier", b'{"inputs":"a","parameters":[{"x":'),
            ("/invocations", b'{"inputs":"a","x":[{"x":'),
            ("/v2/models/minilm/infer", b'{"inputs":[{"name":"text","datatype":"BYTES","shape":[1],"data":'),
            ("/v1/infer", b'{"model":"minilm","input":{"sentence_embedding":[{"text":'),
        ):
            await _post(server, path, head + deep + _closing(head), is_packed=False)


def _closing(head: bytes) -> bytes:
    """What ends the lists and objects that a head begins, some of which it ends."""
    opened = list[int]()
    for mark in head:
        if mark in b"[{":
            opened.append(mark)
        elif mark in b"]}":
            opened.pop()
    return bytes(mark + 2 for mark in reversed(opened))


@_to_what_expands(
    "N7", "JSON that is nested deep within texts: fields and tools of messages, arguments of calls, schemas"
)
async def nested_texts(server: Attacked) -> None:
    deep = _nested(600, b'{"a":', b"}").decode()
    options = GenerationOptions(json_schema=deep)
    for input in (
        TextGenerationInput(messages=[ChatMessage(role="user", content="a", fields=deep)]),
        TextGenerationInput(messages=[ChatMessage(role="user", content="a")], tools=f"[{deep}]"),
        TextGenerationInput(messages=[ChatMessage(role="user", content="a")], template_arguments=deep),
        TextGenerationInput(prompt="a", options=options),
    ):
        data = InferRequest(model="writer", input=TaskInput(text_generation=input)).SerializeToString()
        await _call(server, f"{_API}/Infer", data, is_packed=False)
    call = {"id": "a", "type": "function", "function": {"name": "a", "arguments": deep}}
    said = {"role": "assistant", "tool_calls": [call]}
    await _post(server, "/v1/chat/completions", _json(model="writer", messages=[said]), is_packed=False)


@attack("H1", "a text of 8 MiB, to six protocols in turn", sends_mib=_BODY_MIB)
async def one_long_text(server: Attacked) -> None:
    text = b'"' + b"a" * ((_BODY_MIB << 20) - 256) + b'"'
    tensor = b'[{"name":"text","datatype":"BYTES","shape":[1,1],"data":[' + text + b"]}]"
    for path, head, tail in (
        ("/embed", b'{"inputs":', b"}"),
        ("/v1/embeddings", b'{"model":"minilm","input":[', b"]}"),
        ("/models/classifier", b'{"inputs":', b"}"),
        ("/invocations", b'{"inputs":[', b"]}"),
        ("/v1/infer", b'{"model":"minilm","input":{"sentence_embedding":{"text":', b"}}}"),
    ):
        await _post(server, path, head + text + tail)
    await _post(server, "/v2/models/minilm/infer", b'{"inputs":' + tensor + b"}")


@attack("H2", "a text of 63 MiB, over two protocols of gRPC in turn", sends_mib=_MESSAGE_MIB)
async def one_long_text_in_a_message(server: Attacked) -> None:
    text = b"a" * (63 << 20)
    for path, data in (
        (f"{_API}/Infer", field_of(1, b"minilm") + field_of(4, field_of(2, field_of(1, text)))),
        ("/tei.v1.Embed/Embed", field_of(1, text)),
    ):
        await _call(server, path, data)


@attack("H1", "a heading of CSV with millions of columns, and millions of empty lines", sends_mib=_BODY_MIB)
async def csv_headings(server: Attacked) -> None:
    for body, media_type in (
        (b"," * (_BODY_MIB << 20), "text/csv"),
        (b"inputs\n" + b"\n" * (_BODY_MIB << 19), "text/csv"),
        (b"\n" * (_BODY_MIB << 20), "application/jsonlines"),
    ):
        await _post(server, "/invocations", body, media_type=media_type)


@attack(
    "H2", "64 KB of gzip that are an InferBatch of 33 million empty requests", sends_mib=_MESSAGE_MIB, is_quick=True
)
async def empty_requests(server: Attacked) -> None:
    await _call(server, f"{_API}/InferBatch", _empty_requests())


@cache
def _empty_requests() -> bytes:
    return field_of(1, b"") * (_MESSAGE_MIB << 19)


@attack("H2", "messages with as many empty requests as are allowed, again and again", sends_mib=1)
async def as_many_requests_as_are_allowed(server: Attacked) -> None:
    await _call(server, f"{_API}/InferBatch", field_of(1, b"") * (1 << 18), is_packed=False)


@attack("H2", "a tensor of 64 million packed numbers over the Open Inference Protocol", sends_mib=_MESSAGE_MIB)
async def packed_numbers(server: Attacked) -> None:
    await _call(server, "/inference.GRPCInferenceService/ModelInfer", _packed_numbers())


@cache
def _packed_numbers() -> bytes:
    contents = field_of(3, bytes((_MESSAGE_MIB << 20) - 256))
    tensor = field_of(1, b"input_ids") + field_of(2, b"INT64") + b"\x18\x01" + field_of(5, contents)
    return field_of(1, b"minilm.raw") + field_of(5, tensor)


@attack("H2", "inputs of which millions of empty chat messages are made", sends_mib=_MESSAGE_MIB)
async def empty_chat_messages(server: Attacked) -> None:
    input = TaskInput(text_generation=TextGenerationInput(messages=[ChatMessage()] * (1 << 19)))
    await _call(server, f"{_API}/Infer", InferRequest(model="minilm", input=input).SerializeToString(), is_packed=False)


@attack("M8", "trailers without an end behind a body in chunks", sends_mib=1, is_quick=True)
async def endless_trailers(server: Attacked) -> None:
    host, _, port = server.http.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = post("/embed", b"", f"authorization: Bearer {server.keys['mallory']}", "transfer-encoding: chunked")
    writer.write(head.replace(b"content-length: 0\r\n", b"") + b"2\r\n{}\r\n0\r\n")
    try:
        for _ in range(64):
            writer.write(b"a:b\r\n" * (1 << 13))
            await writer.drain()
        await reader.read()
    except ConnectionError:
        return
    finally:
        writer.close()


@attack("M1", "bodies and messages that never come, from many connections", is_quick=True)
async def bodies_that_never_come(server: Attacked) -> None:
    host, _, port = server.http.rpartition(":")
    head = post("/embed", b"", f"authorization: Bearer {server.keys['mallory']}", "content-length: 1000")
    writers = []
    try:
        for _ in range(200):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(head.replace(b"content-length: 0\r\n", b""))
            writers.append(writer)
            await asyncio.sleep(0.002)
    finally:
        for writer in writers:
            writer.transport.abort()


@attack("M1", "300 health checks a second without a key whose message never comes")
async def health_checks_without_a_message(server: Attacked) -> None:
    def attack_once() -> None:
        with RawHttp2(server.target) as caller:
            for _ in range(300):
                caller.open_call("/grpc.health.v1.Health/Check")

    await asyncio.gather(asyncio.to_thread(attack_once), asyncio.sleep(1))


# The library takes some 700 bytes a token, for one long text at a time.
@attack(
    "H1",
    "a text of half a million tokens to /tokenize, and the same as a message to /v1/infer",
    sends_mib=1,
    constant_mib=448,
)
async def answers_of_many_tokens(server: Attacked) -> None:
    text = b"a " * ((1 << 19) - 64)
    await _post(server, "/tokenize", b'{"model":"classifier","inputs":"' + text + b'"}')
    await _post(server, "/v1/infer", b'{"model":"classifier","input":{"tokenization":{"text":"' + text + b'"}}}')


@_to_what_expands("N2", "a text of 1 MiB of which a normalization makes 18 times as many characters")
async def text_that_grows(server: Attacked) -> None:
    await _post(server, "/v1/embeddings", _json(model="unigram", input="\ufdfa" * 349_500), is_packed=False)


@_to_what_expands("N2", "the same as a pair for a reranker, and in the middle of other text")
async def pair_that_grows(server: Attacked) -> None:
    grows = "so " * 9 + "\ufdfa\u3300\ufdfb" * 100_000
    await _post(server, "/rerank", _json(model="unigram-reranker", query="a", texts=[grows], truncate=True))
    await _post(server, "/tokenize", _json(model="unigram", inputs=grows))


@_to_what_expands("N2", "a thousand texts that grow, each of a few hundred characters", constant_mib=96)
async def many_texts_that_grow(server: Attacked) -> None:
    texts = ["\ufdfa" * 330] * 1000
    await _post(server, "/rerank", _json(model="unigram-reranker", query="\ufdfa" * 10, texts=texts, truncate=True))


def _image(width: int, height: int, mode: str, format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    Image.new(mode, (width, height)).save(file, format, **options)
    return file.getvalue()


async def _view(server: Attacked, data: bytes) -> None:
    await _post(server, "/models/viewer", data, is_packed=False, media_type="image/png")


@_to_the_viewer("N11", "34 bytes of WebP that are an image of 7,000 x 7,000 pixels")
async def image_of_webp(server: Attacked) -> None:
    await _view(server, _large("RGB", "WEBP", lossless=True, method=0))


@_to_the_viewer("N11", "a PNG of 1 x 49,900,000 pixels, and one that lies")
async def image_that_is_a_thread(server: Attacked) -> None:
    for size in ((1, 49_900_000), (49_900_000, 1), (60_000, 800)):
        await _view(server, _png(*size))


@_to_the_viewer("N11", "PNG files of 49 million pixels with a palette, and with transparency")
async def image_with_a_palette(server: Attacked) -> None:
    for mode in ("P", "LA"):
        await _view(server, _large(mode, "PNG"))


@_to_the_viewer("N11", "a photograph of 49 million pixels in several scans, one to be turned, and one in CMYK")
async def image_in_scans(server: Attacked) -> None:
    turned = Image.Exif()
    turned[0x112] = 6
    for mode, options in (("RGB", {"progressive": True}), ("RGB", {"exif": turned}), ("CMYK", {})):
        await _view(server, _large(mode, "JPEG", **options))


_MADE: dict[str, bytes] = {}


def _large(mode: str, format: str, **options: Any) -> bytes:
    name = f"{mode} {format} {sorted(options)}"
    _MADE[name] = _MADE.get(name) or _image(7000, 7000, mode, format, **options)
    return _MADE[name]


@cache
def _png(width: int, height: int) -> bytes:
    """A file of grey zeros, which no image is made for."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return (
        b"\x89PNG\r\n\x1a\n"
        + header
        + chunk(b"IDAT", zlib.compress(bytes((width + 1) * height), 9))
        + chunk(b"IEND", b"")
    )


def _json(**body: Any) -> bytes:
    return json.dumps(body, ensure_ascii=False).encode()


@attack("M8", "binary metadata without a key, of which a few kilobytes are a million values", is_quick=True)
async def metadata_of_many_values(server: Attacked) -> None:
    def attack_once() -> None:
        name, value = b"x-bin", b"," * 3900
        head = frames.block(frames.call_fields(f"{_API}/Infer"))
        # Literal with incremental indexing (RFC 7541, 6.2.1); the newest entry of the table is number 62.
        entry = b"\x40" + bytes([len(name)]) + name + b"\x7f\xbd\x1d" + value
        flags = frames.END_HEADERS | frames.END_STREAM
        with connect(server.target) as connection:
            connection.sendall(frames.PREFACE + frames.settings() + frames.frame(frames.SETTINGS, frames.ACK))
            connection.sendall(frames.frame(frames.HEADERS, flags, 1, head + entry))
            for number in range(3, 41, 2):
                connection.sendall(frames.frame(frames.HEADERS, flags, number, head + bytes([0x80 | 62]) * 60))
            time.sleep(0.2)

    await asyncio.to_thread(attack_once)


@attack("K1", "thousands of requests over HTTP in one packet, without a key")
async def pipelined_requests(server: Attacked) -> None:
    host, _, port = server.http.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(b"GET /x HTTP/1.1\r\nhost: a\r\n\r\n" * 5000)
        for _ in range(5000):
            await reader.readuntil(b"\r\n\r\n")
    finally:
        writer.close()


@attack("K2", "batches of a hundred requests, hundreds at once, whose answers stay unread", sends_mib=1)
async def batches_that_nobody_reads(server: Attacked) -> None:
    data = InferBatchRequest(requests=[embed("a")] * 100).SerializeToString()
    key = b"authorization", b"Bearer " + server.keys["mallory"].encode()

    def attack_once() -> None:
        with connect(server.target) as connection:
            window = frames.settings([(frames.INITIAL_WINDOW_SIZE, 0)])
            connection.sendall(frames.PREFACE + window + frames.frame(frames.SETTINGS, frames.ACK))
            head = frames.block(frames.call_fields(f"{_API}/InferBatch", key))
            for number in range(1, 401, 2):
                connection.sendall(frames.frame(frames.HEADERS, frames.END_HEADERS, number, head))
                connection.sendall(frames.frame(frames.DATA, frames.END_STREAM, number, frames.message(data)))
            time.sleep(2)

    await asyncio.to_thread(attack_once)
