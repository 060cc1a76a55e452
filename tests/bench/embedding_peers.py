"""Embeddings of MiniLM beside other servers and libraries, with the same weights, tokenizer and texts in each dtype.

Servers are called by the client that calls ours. Libraries embed in their own process: batches of 32 texts stand for 32
callers, and single texts for one.
"""

import itertools
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from demo.model import find_minilm
from neuronpipe.api.v1.inference_pb2 import InferResponse
from tests.bench.against_peers import best_systems
from tests.bench.load import HTTP, LoadProcess, System
from tests.bench.measurements import Measurement
from tests.bench.peers.embedders_alone import LIBRARIES, ONNX_FILE, ONNX_FILES
from tests.bench.peers.environments import CACHE
from tests.bench.peers.exports import ENVIRONMENT, export_onnx
from tests.bench.peers.running import PeerProcess, PeerUnavailable, peer_python
from tests.bench.systems import computed_dtypes, embedding_request, of_dtype, run_module, serving_both, take_turns

SECTION = "embeddings"
TRIALS = f"{SECTION}, trials"
CALLERS = (1, 32)
MODEL = "minilm-embedder"
# The largest accepted distance, 1 - cosine, between a peer's vector of a text and ours in the same dtype. Each int8 is
# made in another way: ours with the ranges of sample texts, ONNX's as the numbers come, llama.cpp's in blocks.
TOLERANCES: Mapping[str, float] = {"float32": 1e-4, "bfloat16": 5e-3, "int8": 5e-2}
_CHECKED_TEXTS = 16
_START_LIMIT_S = 180.0
_TURN_LIMIT_S = 120.0

Vectors: TypeAlias = NDArray[np.float32]
# Stops a system for the length of a block.
_Paused: TypeAlias = Callable[[], AbstractContextManager[None]]
# A turn of a peer: callers, seconds, section and round.
_Turn: TypeAlias = Callable[[int, float, str, int], Measurement]


@dataclass(frozen=True)
class _Server:
    """How a server is called, the dtypes that it has, and the settings that are tried. `folder`: of a dtype's model."""

    path: str
    request: Callable[[str], bytes]
    vector: Callable[[bytes], Sequence[float]]
    folder: Callable[[Path, str], Path]
    tried: Sequence[str]
    dtypes: Sequence[str]


def _openai(text: str) -> bytes:
    return json.dumps({"model": "infinity", "input": [text]}).encode()


def _of_openai(answer: bytes) -> Sequence[float]:
    vector: Sequence[float] = json.loads(answer)["data"][0]["embedding"]
    return vector


def _text(text: str) -> bytes:
    return json.dumps({"text": text}).encode()


def _of_text(answer: bytes) -> Sequence[float]:
    vector: Sequence[float] = json.loads(answer)["embedding"]
    return vector


_SERVERS: Mapping[str, _Server] = {
    # Its slots are texts that it computes together.
    "llama-cpp": _Server(
        "/v1/embeddings",
        _openai,
        _of_openai,
        lambda folder, dtype: folder / dtype,
        ["--threads 1 --slots 8", *(f"--threads 2 --slots {slots}" for slots in (4, 8, 32))],
        ("float32", "bfloat16", "int8"),
    ),
    # Its engine `optimum`: an ONNX graph that it optimizes itself.
    "infinity": _Server(
        "/embeddings",
        _openai,
        _of_openai,
        lambda folder, dtype: folder / "infinity",
        [f"--threads 2 --max-batch-size {size}" for size in (8, 32)],
        ("float32",),
    ),
    "onnxruntime": _Server(
        "/",
        _text,
        _of_text,
        lambda folder, dtype: folder / f"onnx-{dtype}",
        ["--threads 1 --workers 2", "--threads 2 --workers 1"],
        ("float32", "int8"),
    ),
}


def measure_embeddings(
    texts: Sequence[str], rounds: int, seconds: float, unavailable: dict[str, str]
) -> Iterator[Measurement]:
    """Each peer takes turns with ours in the same dtype, and is stopped while it is not its turn. A server is measured
    in the best of the settings that are tried. Notes the reason of each peer that cannot be measured in `unavailable`.
    """
    numbers = itertools.count(0, rounds)
    try:
        folder = _export(texts)
    except PeerUnavailable as error:
        unavailable[f"{SECTION}: all peers"] = error.reason
        return
    for dtype in computed_dtypes():
        with ExitStack() as stack:
            repository = _find_embedder(dtype)
            ours = serving_both(stack, repository, dtype)
            loop = stack.enter_context(LoadProcess.started([embedding_request(MODEL, text) for text in texts]))
            for system in ours:
                loop.measure(system, CALLERS[-1], seconds)
            expected = _vectors([_ours(answer) for answer in loop.answers(ours[0], 1, _CHECKED_TEXTS)])
            bench = _Bench(folder, dtype, expected, seconds, unavailable, loop, ours)
            for library, (dtypes, _) in LIBRARIES.items():
                if dtype in dtypes:
                    yield from bench.turns(library, bench.library(library), SECTION, _rounds(numbers, rounds))
            for name, server in _SERVERS.items():
                if dtype in server.dtypes:
                    yield from _measure_server(bench, name, texts, numbers, rounds)


def _measure_server(
    bench: "_Bench", name: str, texts: Sequence[str], numbers: Iterator[int], rounds: int
) -> Iterator[Measurement]:
    server, trials = _SERVERS[name], list[Measurement]()
    with LoadProcess.started([server.request(text) for text in texts]) as loop:
        named = {settings: f"{name} {settings}" for settings in server.tried}
        for settings, full in named.items():
            for trial in bench.turns(full, bench.server(name, settings, loop), TRIALS, (0,)):
                trials.append(trial)
                yield trial
        best = best_systems(trials)
        for settings, full in named.items():
            if of_dtype(full, bench.dtype) in best:
                start = bench.server(name, settings, loop)
                yield from bench.turns(full, start, SECTION, _rounds(numbers, rounds))


def _rounds(numbers: Iterator[int], rounds: int) -> range:
    first = next(numbers)
    return range(first, first + rounds)


@dataclass(frozen=True)
class _Peer:
    """A peer that has given right vectors, and the way to stop it for a while."""

    turn: _Turn
    paused: _Paused


@dataclass(frozen=True)
class _Bench:
    """The peers of a dtype, and ours: `loop` calls `ours`."""

    folder: Path
    dtype: str
    expected: Vectors
    seconds: float
    unavailable: dict[str, str]
    loop: LoadProcess
    ours: Sequence[System]

    def turns(
        self, name: str, start: AbstractContextManager[_Peer], section: str, rounds: Sequence[int]
    ) -> Iterator[Measurement]:
        """Turns of a peer, each in SECTION with turns of ours that follow it."""
        try:
            with start as peer:
                # OpenVINO and onnxruntime prepare for each shape of a batch when they first meet it.
                peer.turn(CALLERS[-1], self.seconds, section, 0)
                for round, callers in itertools.product(rounds, CALLERS):
                    yield peer.turn(callers, self.seconds, section, round)
                    if section == SECTION:
                        with peer.paused():
                            turns = [(callers, system) for system in self.ours]
                            yield from take_turns(section, self.loop, turns, [round], self.seconds)
        except (PeerUnavailable, ConnectionError) as error:
            reason = error.reason if isinstance(error, PeerUnavailable) else str(error)
            self.unavailable[f"{SECTION}: {of_dtype(name, self.dtype)}"] = reason

    @contextmanager
    def library(self, name: str) -> Iterator[_Peer]:
        """A library in a process of its own. Raises PeerUnavailable."""
        system = of_dtype(name, self.dtype)
        command = [peer_python(ENVIRONMENT), "-m", "tests.bench.peers.embedders_alone", str(self.folder)]
        with PeerProcess(name, [*command, name, self.dtype]) as process:
            process.hear("ready", _START_LIMIT_S)
            process.tell({"count": _CHECKED_TEXTS})
            self._check(name, process.hear("embedded", _TURN_LIMIT_S)["vectors"], is_ordered=True)

            def turn(callers: int, seconds: float, section: str, round: int) -> Measurement:
                process.tell({"batch": callers, "seconds": seconds})
                found = process.hear("measured", seconds + _TURN_LIMIT_S)
                return Measurement(
                    section=section,
                    system=system,
                    callers=callers,
                    round=round,
                    throughput_per_s=found["rate_per_s"],
                    latencies_ms={"p50": found["p50_ms"]},
                )

            yield _Peer(turn, process.paused)

    @contextmanager
    def server(self, name: str, settings: str, loop: LoadProcess) -> Iterator[_Peer]:
        """A server that `loop` calls. Raises PeerUnavailable, and ConnectionError where calls fail."""
        server = _SERVERS[name]
        model, script = server.folder(self.folder, self.dtype), f"tests.bench.peers.{name.replace('-', '_')}_server"
        command = [peer_python(name), "-m", script, str(model), *settings.split()]
        # infinity writes the graph that it has optimized into the Hub's cache.
        environment = {"HF_HUB_CACHE": str(self.folder / "infinity/hub")}
        with PeerProcess(name, command, environment) as process:
            target = process.hear("ready", _START_LIMIT_S)["target"]
            system = System(
                of_dtype(f"{name} {settings}", self.dtype), target, server.path, (process.pid,), client=HTTP
            )
            for callers in (1, _CHECKED_TEXTS):
                answers = loop.answers(system, callers, _CHECKED_TEXTS)
                self._check(name, [server.vector(answer) for answer in answers], is_ordered=callers == 1)
            yield _Peer(lambda callers, *turn: loop.measure(system, callers, *turn), process.paused)

    def _check(self, name: str, vectors: Sequence[Sequence[float]], *, is_ordered: bool) -> None:
        if wrong := wrong_vectors(_vectors(vectors), self.expected, TOLERANCES[self.dtype], is_ordered=is_ordered):
            raise PeerUnavailable(name, f"answers wrongly: {wrong}")


def wrong_vectors(vectors: Vectors, expected: Vectors, tolerance: float, *, is_ordered: bool) -> str:
    """The fault of vectors of length 1; empty where there is none. Without an order, each expected one is there."""
    if vectors.shape != expected.shape:
        return f"vectors {list(vectors.shape)} instead of {list(expected.shape)}"
    distances = 1 - expected @ vectors.T
    found = distances.diagonal() if is_ordered else distances.min(axis=1)
    farthest = float(found.max())
    return "" if farthest <= tolerance else f"a vector is {farthest:.4f} away (1 - cosine); the limit is {tolerance:g}"


def _vectors(vectors: Sequence[Sequence[float]]) -> Vectors:
    """Their directions."""
    found: Vectors = np.array(vectors, np.float32)
    found /= np.linalg.norm(found, axis=-1, keepdims=True)
    return found


def _ours(answer: bytes) -> Sequence[float]:
    return InferResponse.FromString(answer).result.sentence_embedding.embedding


def _find_embedder(dtype: str) -> Path:
    repository = CACHE / f"repository-embedder-{dtype}"
    if not (repository / MODEL).is_dir():
        named = ("--name", MODEL, "--repository", str(repository), "--dtype", dtype)
        run_module("-m", "neuronpipe", "compile", str(find_minilm()), "--task", "sentence-embedding", *named)
    return repository


def _export(texts: Sequence[str]) -> Path:
    folder = export_onnx()
    (folder / "texts.json").write_text(json.dumps(list(texts)))
    for dtype, file in ONNX_FILES.items():
        target = folder / f"onnx-{dtype}"
        target.mkdir(exist_ok=True)
        shutil.copy(folder / "source" / file, target / ONNX_FILE)
        shutil.copy(folder / "source/tokenizer.json", target)
    # infinity optimizes the graph into this folder, and then takes what it finds there.
    shutil.rmtree(folder / "infinity", ignore_errors=True)
    shutil.copytree(folder / "onnx-float32", folder / "infinity")
    for described in (folder / "source").glob("*.json"):
        shutil.copy(described, folder / "infinity")
    return folder
