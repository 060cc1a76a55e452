"""The systems of ours that are measured, and the bundles that they serve."""

import multiprocessing
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import grpc
import uvloop

from demo.processes import ServiceProcess, four_processes
from neuronpipe.api.v1.inference_pb2 import InferRequest
from neuronpipe.api.v1.tasks_pb2 import TaskInput, TextClassificationInput, Truncation
from tests.bench.closed_loop import ECHO, System
from tests.bench.peers.environments import CACHE, ROOT

MODEL = "minilm"
DTYPES = ("float32", "bfloat16", "int8")
ALL, FOUR, ECHO_SERVER = "serve all", "four processes", "echo"
# The texts come round and round: with a cache, none would be tokenized.
NO_CACHE = ("--token-cache-bytes", "0")
# One the reference for the other: also what the peers serve.
SOURCE = CACHE / "source"
_TEXTS = 1024


def read_texts() -> tuple[Path, list[str]]:
    """The benchmark's texts and the file that holds them, one a line."""
    file = CACHE / "texts.txt"
    file.parent.mkdir(parents=True, exist_ok=True)
    # A process of its own: transformers stays out of the ones that measure.
    subprocess.run([sys.executable, "-m", "tests.bench.texts", str(_TEXTS), str(file)], check=True, cwd=ROOT)
    return file, file.read_text().splitlines()


def make_request(text: str) -> bytes:
    """A request as a client sends it."""
    input = TaskInput(text_classification=TextClassificationInput(text=text, truncation=Truncation.TRUNCATION_RIGHT))
    return InferRequest(model=MODEL, input=input).SerializeToString()


def find_repository(kind: str) -> Path:
    """The repository with the model in a dtype, or `fake`; compiled where it is not there yet."""
    repository = CACHE / f"repository-{kind}"
    if not (repository / MODEL).is_dir():
        if not (SOURCE / "config.json").is_file():
            texts = CACHE / "no-texts.json"
            texts.write_text("[]")
            _run("-m", "tests.bench.model", str(SOURCE), str(texts))
        how = ("--backend", "fake") if kind == "fake" else ("--dtype", kind)
        task = ("--task", "text-classification", "--name", MODEL, "--repository", str(repository))
        _run("-m", "neuronpipe", "compile", str(SOURCE), *task, *how)
    return repository


def _run(*arguments: str) -> None:
    subprocess.run([sys.executable, *arguments], check=True, stdout=sys.stderr, cwd=ROOT)


@contextmanager
def serving_all(
    repository: Path, name: str = ALL, options: Sequence[str] = NO_CACHE, environment: Mapping[str, str] | None = None
) -> Iterator[System]:
    """`serve all`, ready; ended with the block."""
    with ServiceProcess("all", "--repository", str(repository), *options, environment=environment) as process:
        yield System(name, process.wait_until_ready().target, pids=(process.pid,))


@contextmanager
def serving_four(
    repository: Path, name: str = FOUR, options: Sequence[str] = NO_CACHE, environment: Mapping[str, str] | None = None
) -> Iterator[System]:
    """The four processes, ready; ended with the block. `options` are the tokenizer's."""
    with four_processes(repository, stage_options={"tokenizer": options}, environment=environment) as processes:
        yield System(name, processes["gateway"].target, pids=tuple(process.pid for process in processes.values()))


@contextmanager
def serving_echo() -> Iterator[System]:
    """A gRPC server, in a process of its own, that answers with what it gets; ended with the block."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_serve_echo, args=(sender,), name=ECHO_SERVER, daemon=True)
    process.start()
    try:
        yield System(ECHO_SERVER, f"127.0.0.1:{receiver.recv()}", ECHO, (process.pid or 0,))
    finally:
        process.terminate()
        process.join()


def _serve_echo(parent: "Connection[int, int]") -> None:
    async def echo(message: bytes, context: "grpc.aio.ServicerContext[bytes, bytes]") -> bytes:
        return message

    async def serve() -> None:
        server = grpc.aio.server()
        service, method = ECHO.strip("/").split("/")
        handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(echo)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
        parent.send(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        await server.wait_for_termination()

    uvloop.run(serve())
