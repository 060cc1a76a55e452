"""The systems of ours that are measured, and the bundles that they serve."""

import asyncio
import random
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType

import grpc
import uvloop

from demo.processes import ServiceProcess, four_processes
from neuronpipe.api.v1.inference_pb2 import InferRequest
from neuronpipe.api.v1.tasks_pb2 import SentenceEmbeddingInput, TaskInput, TextClassificationInput, Truncation
from neuronpipe.measure.load.inputs import builtin_texts
from neuronpipe.platform.process.health import HealthBoard
from neuronpipe.platform.process.in_flight import InFlight
from neuronpipe.platform.process.settings import ProcessSettings
from neuronpipe.platform.process.worker import Worker
from neuronpipe.platform.tls import ServerTls, TlsFiles
from neuronpipe.rpc.door import GrpcDoor
from neuronpipe.rpc.rpcs import Rpc
from tests.bench.load import ECHO, LoadProcess, System
from tests.bench.measurements import Measurement
from tests.bench.peers.environments import CACHE, ROOT
from tests.servers.certificates import Authority

MODEL = "minilm"
DTYPES = ("float32", "bfloat16", "int8")
ALL, FOUR = "serve all", "four processes"
# Servers that answer with what they get.
ECHO_SERVER, OUR_ECHO = "grpc.aio's echo", "our echo"
# The texts come round and round: with a cache, none would be tokenized.
NO_CACHE = ("--token-cache-bytes", "0")
# One the reference for the other: also what the peers serve.
SOURCE = CACHE / "source"
_TEXTS, _BLOCK = 1024, 32


def make_texts() -> list[str]:
    """English texts of up to 128 tokens, 33 on average, the same ones in every run.

    Long and short are dealt evenly over the run, at random only within each 32 texts, so that a system which gets
    through a part of them has the same work as one that gets through all.
    """
    by_length = sorted(builtin_texts(0)[:_TEXTS], key=len)
    chooser, count = random.Random(0), _TEXTS // _BLOCK
    blocks = [by_length[number::count] for number in range(count)]
    return [text for block in blocks for text in chooser.sample(block, len(block))]


def make_request(text: str) -> bytes:
    """A request as a client sends it."""
    input = TaskInput(text_classification=TextClassificationInput(text=text, truncation=Truncation.TRUNCATION_RIGHT))
    return InferRequest(model=MODEL, input=input).SerializeToString()


def embedding_request(model: str, text: str) -> bytes:
    """A request for a text's vector, as a client sends it."""
    input = TaskInput(sentence_embedding=SentenceEmbeddingInput(text=text, truncation=Truncation.TRUNCATION_RIGHT))
    return InferRequest(model=model, input=input).SerializeToString()


def find_repository(kind: str) -> Path:
    """The repository with the model in a dtype, or `fake`; compiled where it is not there yet."""
    repository = CACHE / f"repository-{kind}"
    if not (repository / MODEL).is_dir():
        if not (SOURCE / "config.json").is_file():
            texts = CACHE / "no-texts.json"
            CACHE.mkdir(parents=True, exist_ok=True)
            texts.write_text("[]")
            run_module("-m", "tests.bench.model", str(SOURCE), str(texts))
        how = ("--backend", "fake") if kind == "fake" else ("--dtype", kind)
        task = ("--task", "text-classification", "--name", MODEL, "--repository", str(repository))
        run_module("-m", "neuronpipe", "compile", str(SOURCE), *task, *how)
    return repository


def run_module(*arguments: str) -> None:
    subprocess.run([sys.executable, *arguments], check=True, stdout=sys.stderr, cwd=ROOT)


def computed_dtypes() -> tuple[str, ...]:
    """Those of DTYPES that this CPU computes in. Without instructions for bfloat16, OpenVINO takes float32, or, with
    AVX-512, emulates it: 20 to 50 times slower (2026.4, 2026-11-25).
    """
    from neuronpipe.stages.neuron_executor.runtimes import openvino  # processes of echo servers do without it

    return tuple(dtype for dtype in DTYPES if dtype != "bfloat16" or openvino.has_bfloat16())


@contextmanager
def serving_all(
    repository: Path, name: str = ALL, options: Sequence[str] = NO_CACHE, environment: Mapping[str, str] | None = None
) -> Iterator[System]:
    """`serve all`, ready; ended with the block."""
    with ServiceProcess("all", "--repository", str(repository), *options, environment=environment) as process:
        yield System(name, process.wait_until_ready().target, pids=(process.pid,))


@contextmanager
def serving_four(
    repository: Path,
    name: str = FOUR,
    options: Sequence[str] = NO_CACHE,
    environment: Mapping[str, str] | None = None,
    stage_options: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> Iterator[System]:
    """The four processes, ready; ended with the block. `options` are the tokenizer's."""
    options_of = {"tokenizer": options, **stage_options}
    with four_processes(repository, stage_options=options_of, environment=environment) as processes:
        yield System(name, processes["gateway"].target, pids=tuple(process.pid for process in processes.values()))


def serving_both(stack: ExitStack, repository: Path, dtype: str) -> list[System]:
    """ALL and FOUR with the models in a dtype, ready; ended with the stack."""
    systems = (serving_all(repository, of_dtype(ALL, dtype)), serving_four(repository, of_dtype(FOUR, dtype)))
    return [stack.enter_context(system) for system in systems]


def of_dtype(system: str, dtype: str) -> str:
    """The name of a system that computes in a dtype."""
    return f"{system}, {dtype}"


@contextmanager
def serving_echo(name: str = ECHO_SERVER, *, has_tls: bool = False) -> Iterator[System]:
    """ECHO_SERVER or OUR_ECHO, in a process of its own; ended with the block."""
    with ExitStack() as stack:
        folder, ca = "", b""
        if has_tls:
            authority, folder = Authority(), stack.enter_context(tempfile.TemporaryDirectory())
            authority.issue().write(Path(folder))
            ca = authority.certificate
        serve = _serve_our_echo if name == OUR_ECHO else _serve_grpc_aio_echo
        worker = stack.enter_context(Worker.started(_serve_echo, serve, folder, name="echo"))
        target = f"127.0.0.1:{worker.receive()}"
        yield System(with_tls(name) if has_tls else name, target, ECHO, (worker.pid,), ca=ca)


def with_tls(name: str) -> str:
    """The name of a system whose port has TLS."""
    return f"{name}, TLS"


def _serve_echo(
    pipe: "Connection[int, None]", serve: Callable[[Path | None], AbstractAsyncContextManager[int]], certificate: str
) -> None:
    """`certificate`: the folder of tls.crt and tls.key; empty: no TLS."""

    async def run() -> None:
        async with serve(Path(certificate) if certificate else None) as port:
            pipe.send(port)
            with suppress(EOFError):
                await asyncio.to_thread(pipe.recv)  # until the parent closes it

    uvloop.run(run())


async def _echo(message: bytes, context: object) -> bytes:
    return message


@asynccontextmanager
async def _serve_grpc_aio_echo(certificate: Path | None) -> AsyncIterator[int]:
    server = grpc.aio.server()
    service, method = ECHO.strip("/").split("/")
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(_echo)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    if certificate:
        pair = (certificate / "tls.key").read_bytes(), (certificate / "tls.crt").read_bytes()
        port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    else:
        port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield port
    await server.stop(None)


@asynccontextmanager
async def _serve_our_echo(certificate: Path | None) -> AsyncIterator[int]:
    settings = ProcessSettings(listen="127.0.0.1:0")
    rpc = Rpc(ECHO, "bytes", decode=bytes, encode=bytes)
    tls = ServerTls(TlsFiles(certificate / "tls.crt", certificate / "tls.key")) if certificate else None
    door = GrpcDoor(settings, [rpc.service], tls)
    health = HealthBoard(door.services)
    await door.listen(health, InFlight("echo", settings.max_message_bytes, settings.max_receiving_bytes))
    door.open([(rpc, _echo)])
    health.open()
    yield door.port


def take_turns(
    section: str, loop: LoadProcess, turns: Sequence[tuple[int, System]], rounds: Sequence[int], seconds: float
) -> Iterator[Measurement]:
    """The turns of each round: a number of callers, and the system that they call."""
    for round in rounds:
        for callers, system in turns:
            yield loop.measure(system, callers, seconds, section, round)
