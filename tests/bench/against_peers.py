"""Other serving systems with the same model on the same texts, each beside ours: as people write them, in PyTorch, and
like for like, with the graph, the tokenizer and the dtype that ours have.

Each is called by the client that calls ours.
"""

import functools
import itertools
import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from neuronpipe.api.oip.v2.open_inference_pb2 import ModelInferRequest, ModelInferResponse
from neuronpipe.api.v1.inference_pb2 import InferResponse
from neuronpipe.bundles.repository import read_repository
from tests.bench.load import GRPC, HTTP, PIPELINE, PIPELINE_BATCHES, LoadProcess, System
from tests.bench.measurements import Measurement
from tests.bench.peers.classifier import GRAPH_FILE
from tests.bench.peers.embedders_alone import ONNX_CLASSIFIERS, ONNX_FILE
from tests.bench.peers.environments import CACHE, ROOT
from tests.bench.peers.exports import export_onnx
from tests.bench.peers.running import PeerProcess, PeerUnavailable, peer_python
from tests.bench.systems import (
    ALL,
    DTYPES,
    SOURCE,
    computed_dtypes,
    find_repository,
    make_request,
    of_dtype,
    serving_all,
    serving_both,
    take_turns,
)

SECTION = "peers"
LIKE_FOR_LIKE = "like for like"
# One turn of each of the settings that are tried.
TRIALS = f"{LIKE_FOR_LIKE}, trials"
CALLERS = (1, 32)
_CHECKED_TEXTS = 16
_START_LIMIT_S = 120
# Padding and the order of float32 sums differ between systems; these differences are some 1e-6.
_TOLERANCE = 1e-3
# The same graph, but int8 and bfloat16 differ a little by batch: of 16 texts at once, some 0.01.
_GRAPH_TOLERANCE = 0.05

# The likeliest label and its probability.
_Answer: TypeAlias = tuple[str, float]


@dataclass(frozen=True)
class _Peer:
    """How a peer is called, and its settings: as people write it, and those that are tried like for like.

    `request`: of a text and the model's name.
    """

    client: str
    path: str
    request: Callable[[str, str], bytes]
    answer: Callable[[bytes], _Answer]
    settings: Sequence[str] = ("",)
    tried: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    dtypes: Sequence[str] = DTYPES


def _plain(text: str, model: str) -> bytes:
    return text.encode()


def _text(text: str, model: str) -> bytes:
    return json.dumps({"text": text}).encode()


def _input(text: str, model: str) -> bytes:
    return json.dumps({"model": model, "input": [text]}).encode()


def _tensor(text: str, model: str) -> bytes:
    request = ModelInferRequest(model_name="classifier")
    request.inputs.add(name="TEXT", datatype="BYTES", shape=[1, 1])
    data = text.encode()
    request.raw_input_contents.append(len(data).to_bytes(4, "little") + data)
    return request.SerializeToString()


def _named(answer: bytes) -> _Answer:
    said: Any = json.loads(answer)
    return said["label"], said["score"]


def _likeliest(answer: bytes) -> _Answer:
    """infinity answers with every label."""
    best = max(json.loads(answer)["data"][0], key=lambda scored: scored["score"])
    return best["label"], best["score"]


def _of_tensors(answer: bytes) -> _Answer:
    response = ModelInferResponse.FromString(answer)
    tensors = dict(zip((output.name for output in response.outputs), response.raw_output_contents, strict=True))
    return tensors["LABEL"][4:].decode(), struct.unpack("<f", tensors["SCORE"])[0]


def _ours(answer: bytes) -> _Answer:
    (best,) = InferResponse.FromString(answer).result.text_classification.labels
    return best.label, best.score


# Which of them is better depends on the machine and on the callers: both are measured.
_THREADS = ("--threads 1 --workers 2", "--threads 2 --workers 1")
_TWO_OF_ONE = tuple(f"{_THREADS[0]} --max-batch-size {size}" for size in (4, 8, 16))
_ONE_OF_TWO = f"{_THREADS[1]} --max-batch-size 8"
_AT_ONCE = f"{_ONE_OF_TWO} --batch-timeout-ms 0"
_PEERS = {
    "transformers": _Peer(PIPELINE, "", _plain, _named),
    "transformers-batch": _Peer(PIPELINE_BATCHES, "", _plain, _named),
    "litserve": _Peer(HTTP, "/predict", _text, _named, _THREADS, (*_TWO_OF_ONE, _AT_ONCE, _ONE_OF_TWO)),
    "ray": _Peer(
        *(HTTP, "/", _text, _named, _THREADS, (*_TWO_OF_ONE, _AT_ONCE)), {"RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"}
    ),
    # Its pool has too few threads for two replicas on two CPUs (infinity 0.0.78): neither would answer.
    "infinity": _Peer(
        *(HTTP, "/classify", _input, _likeliest),
        tried=[f"--threads 2 --max-batch-size {size}" for size in (4, 8, 16, 32)],
    ),
    "triton": _Peer(
        *(GRPC, "/inference.GRPCInferenceService/ModelInfer", _tensor, _of_tensors, _THREADS),
        (*_TWO_OF_ONE, f"{_TWO_OF_ONE[1]} --queue-delay-us 1000", _ONE_OF_TWO),
    ),
    # Behind FastAPI, each text alone, with the classifier's graph that optimum exports; its CPU kernels for
    # transformers have no bfloat16.
    "onnxruntime": _Peer(HTTP, "/", _text, _named, (), _THREADS, dtypes=("float32", "int8")),
}
ALL_PEERS = tuple(_PEERS)
# Peers that no registry of packages has in a form that runs here, with the reason.
NOT_TO_BE_HAD = {
    "Triton with another back end than Python": "the wheel nvidia-pytriton ships backends/python alone, and the "
    "package tritonserver is a placeholder; other back ends come with NVIDIA's container",
    "text-embeddings-inference": "its server is published as a container and as source; its engine, candle, is "
    "measured in process",
}

# Stops a system for the length of a block.
_Paused: TypeAlias = Callable[[], AbstractContextManager[None]]
# Our turns after a peer's: the generator and the systems that it calls.
_Ours: TypeAlias = tuple[LoadProcess, Sequence[System]]


def measure_peers(
    peers: Sequence[str], texts: Sequence[str], rounds: int, seconds: float, unavailable: dict[str, str]
) -> Iterator[Measurement]:
    """A peer and ours take turns while the peer runs, stopped while it is not its turn; then the next peer comes.

    Notes the reason of each peer that cannot be measured in `unavailable`. A round's number holds for one peer with one
    setting.
    """
    with ExitStack() as stack:
        ours = [
            stack.enter_context(serving_all(find_repository(dtype), of_dtype(ALL, dtype)))
            for dtype in computed_dtypes()
        ]
        loop = stack.enter_context(LoadProcess.started([make_request(text) for text in texts]))
        numbers = itertools.count(0, rounds)
        expected = _reference_answers(tuple(texts[:_CHECKED_TEXTS]))
        for name in peers:
            with _Bench.started(name, "", SOURCE, texts, expected, unavailable) as bench:
                for settings in _PEERS[name].settings:
                    first = next(numbers)
                    yield from bench.turns(settings, SECTION, seconds, range(first, first + rounds), (loop, ours))


def measure_like_for_like(
    peers: Sequence[str], texts: Sequence[str], rounds: int, seconds: float, unavailable: dict[str, str]
) -> Iterator[Measurement]:
    """The same with each dtype's graph, in the best of the settings that are tried, with many callers and with one."""
    numbers = itertools.count(0, rounds)
    for dtype in computed_dtypes():
        repository, graph = find_repository(dtype), export_graph(dtype)
        with ExitStack() as stack:
            ours = serving_both(stack, repository, dtype)
            loop = stack.enter_context(LoadProcess.started([make_request(text) for text in texts]))
            for system in ours:
                loop.measure(system, CALLERS[-1], seconds)
            expected = [_ours(answer) for answer in loop.answers(ours[0], 1, _CHECKED_TEXTS)]
            for name in (name for name in peers if _PEERS[name].tried and dtype in _PEERS[name].dtypes):
                with _Bench.started(name, dtype, graph, texts, expected, unavailable) as bench:
                    trials = []
                    for settings in _PEERS[name].tried:
                        for trial in bench.turns(settings, TRIALS, seconds):
                            trials.append(trial)
                            yield trial
                    best = best_systems(trials)
                    for settings in _PEERS[name].tried:
                        if bench.name_of(settings) in best:
                            first = next(numbers)
                            of_rounds = range(first, first + rounds)
                            yield from bench.turns(settings, LIKE_FOR_LIKE, seconds, of_rounds, (loop, ours))


def best_systems(trials: Sequence[Measurement]) -> set[str]:
    """The best with many callers, and the best with one."""
    valid = [trial for trial in trials if trial.latencies_ms and not trial.errors]
    many, alone = ([trial for trial in valid if trial.callers == callers] for callers in reversed(CALLERS))
    best = {max(many, key=lambda trial: trial.throughput_per_s).system} if many else set()
    return best | ({min(alone, key=lambda trial: trial.latencies_ms["p50"]).system} if alone else set())


@dataclass(frozen=True)
class _Bench:
    """One peer with one model, and its generator. `dtype`: of a graph like ours; empty: as people write the peer."""

    peer: str
    dtype: str
    model: Path
    loop: LoadProcess
    expected: Sequence[_Answer]
    unavailable: dict[str, str]

    @classmethod
    @contextmanager
    def started(
        cls,
        peer: str,
        dtype: str,
        model: Path,
        texts: Sequence[str],
        expected: Sequence[_Answer],
        unavailable: dict[str, str],
    ) -> "Iterator[_Bench]":
        """Its generator ends with the block."""
        with LoadProcess.started([_PEERS[peer].request(text, model.name) for text in texts]) as loop:
            yield cls(peer, dtype, model, loop, expected, unavailable)

    def name_of(self, settings: str) -> str:
        """As the tables name it."""
        name = f"{self.peer} {settings}".strip()
        return of_dtype(name, self.dtype) if self.dtype else name

    def turns(
        self, settings: str, section: str, seconds: float, rounds: Sequence[int] = (0,), ours: _Ours | None = None
    ) -> Iterator[Measurement]:
        """Turns of the peer, each with turns of ours that follow it."""
        try:
            with self._running(settings) as (system, paused):
                # OpenVINO prepares for each shape of a batch when it first meets it.
                self.loop.measure(system, CALLERS[-1], seconds)
                for round, callers in itertools.product(rounds, CALLERS):
                    yield self.loop.measure(system, callers, seconds, section, round)
                    if ours:
                        with paused():
                            turns = [(callers, mine) for mine in ours[1]]
                            yield from take_turns(section, ours[0], turns, [round], seconds)
        except PeerUnavailable as error:
            self._note(settings, error.reason)
        except ConnectionError as error:
            self._note(settings, str(error))

    def _note(self, settings: str, reason: str) -> None:
        name = self.name_of(settings)
        self.unavailable[f"{LIKE_FOR_LIKE}: {name}" if self.dtype else name] = reason

    @contextmanager
    def _running(self, settings: str) -> Iterator[tuple[System, _Paused]]:
        """A system that has given right answers, one by one and all at once, and the way to stop it for a while."""
        peer, name = _PEERS[self.peer], self.name_of(settings)
        with ExitStack() as stack:
            system = System(name, str(self.model), peer.path, client=peer.client)
            paused: _Paused = nullcontext
            if peer.path:
                words = [f"tests.bench.peers.{self.peer}_server", str(self.model), *settings.split()]
                command = [peer_python(self.peer), "-m", *words]
                environment = peer.environment if self.dtype else {}
                process = stack.enter_context(PeerProcess(self.peer, command, environment))
                target = process.hear("ready", _START_LIMIT_S)["target"]
                system, paused = replace(system, target=target, pids=(process.pid,)), process.paused
            for callers in (1, _CHECKED_TEXTS):
                answers = [peer.answer(answer) for answer in self.loop.answers(system, callers, _CHECKED_TEXTS)]
                tolerance = _GRAPH_TOLERANCE if self.dtype else _TOLERANCE
                if wrong := wrong_answer(answers, self.expected, is_ordered=callers == 1, tolerance=tolerance):
                    raise PeerUnavailable(self.peer, f"answers wrongly with {callers} callers: {wrong}")
            yield system, paused


def wrong_answer(
    answers: Sequence[_Answer], expected: Sequence[_Answer], *, is_ordered: bool, tolerance: float = _GRAPH_TOLERANCE
) -> str:
    """What is wrong; empty where nothing is. Without an order, answers are compared by their score."""
    if len(answers) != len(expected):
        return f"{len(answers)} answers to {len(expected)} texts"
    labels = sorted({label for label, _ in expected})

    # With two labels: the probability of the first, as a text in the middle may have either.
    def first_scores(given: Sequence[_Answer]) -> list[float]:
        scores = [score if label == labels[0] else 1 - score for label, score in given]
        return scores if is_ordered else sorted(scores)

    for mine, theirs in zip(first_scores(answers), first_scores(expected), strict=True):
        if abs(mine - theirs) > tolerance:
            return f"probability {mine:.3f} of {labels[0]!r} instead of {theirs:.3f}"
    return ""


@functools.cache
def _reference_answers(texts: tuple[str, ...]) -> list[_Answer]:
    """What transformers answers to texts, in a process of its own: torch stays out of the one that measures."""
    file = CACHE / "checked-texts.json"
    file.write_text(json.dumps(texts))
    command = [sys.executable, "-m", "tests.bench.model", str(SOURCE), str(file)]
    made = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT)
    return [(label, score) for _, label, score in json.loads(made.stdout)]


def export_graph(dtype: str) -> Path:
    """A folder with the graph of our bundle in a dtype, for the peers."""
    folder = CACHE / f"graph-{dtype}"
    folder.mkdir(parents=True, exist_ok=True)
    (bundle,) = read_repository(find_repository(dtype))
    artifact = bundle.artifact("openvino")
    with bundle.artifact_files(artifact) as files:
        for file in files:
            shutil.copy(file, folder)
    (folder / "tokenizer.json").write_bytes(bundle.tokenizer_json())
    # infinity looks into it for the task.
    shutil.copy(SOURCE / "config.json", folder)
    if graph := ONNX_CLASSIFIERS.get(dtype):
        with suppress(PeerUnavailable):  # the peer that needs it says that it has none
            shutil.copy(export_onnx() / "classifier" / graph, folder / ONNX_FILE)
    described = {"labels": bundle.spec.labels, "properties": artifact.properties}
    (folder / GRAPH_FILE).write_text(json.dumps(described))
    return folder
