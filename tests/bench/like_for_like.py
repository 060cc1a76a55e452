"""Other serving systems with the graph, the tokenizer and the dtype that ours have, each with its best settings, and
called by the client that calls ours.
"""

import json
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from neuronpipe.api.oip.v2.open_inference_pb2 import ModelInferRequest, ModelInferResponse
from neuronpipe.api.v1.inference_pb2 import InferResponse
from neuronpipe.bundles.repository import read_repository
from tests.bench.closed_loop import GRPC, HTTP, ClosedLoop, System
from tests.bench.measurements import Measurement
from tests.bench.models import of_dtype
from tests.bench.peers.classifier import GRAPH_FILE
from tests.bench.peers.environments import CACHE
from tests.bench.peers.running import PeerProcess, PeerUnavailable, running_server
from tests.bench.systems import (
    ALL,
    FOUR,
    SOURCE,
    computed_dtypes,
    find_repository,
    make_request,
    serving_all,
    serving_four,
)

SECTION = "like for like"
# One turn of each of the settings that are tried.
TRIALS = f"{SECTION}, trials"
CALLERS = (1, 32)
_CHECKED_TEXTS = 16
# The same graph, but int8 and bfloat16 differ a little by batch: of 16 texts at once, some 0.01.
_SCORE_TOLERANCE = 0.05

_Answer: TypeAlias = tuple[str, float]


@dataclass(frozen=True)
class _Peer:
    """How a peer is called, and the settings that are tried.

    `request`: of a text and the model's name. `answer`: the likeliest label and its probability.
    """

    client: str
    path: str
    request: Callable[[str, str], bytes]
    answer: Callable[[bytes], _Answer]
    settings: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


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


def _of_json(answer: bytes) -> _Answer:
    said: Any = json.loads(answer)
    return said["label"], said["score"]


def _of_scores(answer: bytes) -> _Answer:
    ((best,),) = json.loads(answer)["data"]
    return best["label"], best["score"]


def _of_tensors(answer: bytes) -> _Answer:
    response = ModelInferResponse.FromString(answer)
    tensors = dict(zip((output.name for output in response.outputs), response.raw_output_contents, strict=True))
    return tensors["LABEL"][4:].decode(), struct.unpack("<f", tensors["SCORE"])[0]


def _ours(answer: bytes) -> _Answer:
    (best,) = InferResponse.FromString(answer).result.text_classification.labels
    return best.label, best.score


_TWO_OF_ONE = tuple(f"--threads 1 --workers 2 --max-batch-size {size}" for size in (4, 8, 16))
_ONE_OF_TWO = "--threads 2 --workers 1 --max-batch-size 8"
_PEERS = {
    "litserve": _Peer(
        HTTP, "/predict", _text, _of_json, (*_TWO_OF_ONE, f"{_ONE_OF_TWO} --batch-timeout-ms 0", _ONE_OF_TWO)
    ),
    "ray": _Peer(
        *(HTTP, "/", _text, _of_json),
        (*_TWO_OF_ONE, f"{_ONE_OF_TWO} --batch-timeout-ms 0"),
        {"RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"},
    ),
    "infinity": _Peer(
        # Its pool has too few threads for two replicas on two CPUs (infinity 0.0.78): neither would answer.
        *(HTTP, "/classify", _input, _of_scores),
        tuple(f"--threads 2 --max-batch-size {size}" for size in (4, 8, 16, 32)),
    ),
    "triton": _Peer(
        *(GRPC, "/inference.GRPCInferenceService/ModelInfer", _tensor, _of_tensors),
        (*_TWO_OF_ONE, f"{_TWO_OF_ONE[1]} --queue-delay-us 1000", _ONE_OF_TWO),
    ),
}


def measure_like_for_like(
    peers: Sequence[str], texts: Sequence[str], rounds: int, seconds: float, unavailable: dict[str, str]
) -> Iterator[Measurement]:
    """A peer and ours take turns while the peer runs, stopped while it is not its turn; then the next peer comes.

    A round's number holds for one peer with one setting. Notes the reason of each peer that cannot be measured in
    `unavailable`.
    """
    first = 0
    for dtype in computed_dtypes():
        repository, graph = find_repository(dtype), export_graph(dtype)
        with ExitStack() as stack:
            ours = [
                stack.enter_context(serving_all(repository, of_dtype(ALL, dtype))),
                stack.enter_context(serving_four(repository, of_dtype(FOUR, dtype))),
            ]
            loop = stack.enter_context(ClosedLoop.started([make_request(text) for text in texts]))
            for system in ours:
                loop.measure(system, CALLERS[-1], seconds)
            expected = [_ours(answer) for answer in loop.answers(ours[0], 1, _CHECKED_TEXTS)]
            for name, peer in _PEERS.items():
                if name not in peers:
                    continue
                requests = [peer.request(text, graph.name) for text in texts]
                with ClosedLoop.started(requests) as peer_loop:
                    bench = _Bench(name, dtype, graph, peer_loop, expected, unavailable)
                    trials = []
                    for settings in peer.settings:
                        for trial in bench.turns(settings, TRIALS, seconds):
                            trials.append(trial)
                            yield trial
                    for settings in _best_settings(peer.settings, trials, bench):
                        yield from bench.turns(settings, SECTION, seconds, range(first, first + rounds), (loop, ours))
                        first += rounds


def _best_settings(tried: Sequence[str], trials: Sequence[Measurement], bench: "_Bench") -> Iterator[str]:
    """The best with many callers, and, if they are others, the best with one."""
    of_callers = {
        callers: [one for one in trials if one.callers == callers and one.latencies_ms and not one.errors]
        for callers in CALLERS
    }
    best = []
    if many := of_callers[CALLERS[-1]]:
        best.append(max(many, key=lambda one: one.throughput_per_s).system)
    if alone := of_callers[CALLERS[0]]:
        best.append(min(alone, key=lambda one: one.latencies_ms["p50"]).system)
    for settings in tried:
        if bench.name_of(settings) in best:
            yield settings


@dataclass(frozen=True)
class _Bench:
    """One peer with one graph."""

    peer: str
    dtype: str
    graph: Path
    loop: ClosedLoop
    expected: Sequence[_Answer]
    unavailable: dict[str, str]

    def name_of(self, settings: str) -> str:
        """As the tables name it."""
        return of_dtype(f"{self.peer} {settings}", self.dtype)

    def turns(
        self,
        settings: str,
        section: str,
        seconds: float,
        rounds: Sequence[int] = (0,),
        ours: tuple[ClosedLoop, Sequence[System]] | None = None,
    ) -> Iterator[Measurement]:
        """Turns of the peer, each with turns of ours that follow it."""
        try:
            with self._running(settings) as (system, process):
                # OpenVINO prepares for each shape of a batch when it first meets it.
                self.loop.measure(system, CALLERS[-1], seconds)
                for round in rounds:
                    for callers in CALLERS:
                        found = self.loop.measure(system, callers, seconds)
                        yield Measurement(
                            section=section, system=system.name, callers=callers, round=round, **vars(found)
                        )
                        if ours:
                            with process.paused():
                                yield from _our_turns(*ours, section, callers, round, seconds)
        except (PeerUnavailable, ConnectionError) as error:
            self.unavailable[f"{SECTION}: {self.name_of(settings)}"] = str(error)

    @contextmanager
    def _running(self, settings: str) -> Iterator[tuple[System, PeerProcess]]:
        """A server that has given right answers, one by one and all at once."""
        peer = _PEERS[self.peer]
        with running_server(self.peer, self.graph, settings.split(), peer.environment) as (process, target):
            system = System(self.name_of(settings), target, peer.path, (process.pid,), peer.client)
            for callers in (1, _CHECKED_TEXTS):
                answers = [peer.answer(one) for one in self.loop.answers(system, callers, _CHECKED_TEXTS)]
                if wrong := wrong_answer(answers, self.expected, is_ordered=callers == 1):
                    raise PeerUnavailable(self.peer, f"answers wrongly with {callers} callers: {wrong}")
            yield system, process


def _our_turns(
    loop: ClosedLoop, systems: Sequence[System], section: str, callers: int, round: int, seconds: float
) -> Iterator[Measurement]:
    for system in systems:
        found = loop.measure(system, callers, seconds)
        yield Measurement(section=section, system=system.name, callers=callers, round=round, **vars(found))


def wrong_answer(answers: Sequence[_Answer], expected: Sequence[_Answer], *, is_ordered: bool) -> str:
    """What is wrong; empty where nothing is. Without an order, answers are compared by their score."""
    if len(answers) != len(expected):
        return f"{len(answers)} answers to {len(expected)} texts"
    labels = sorted({label for label, _ in expected})

    # With two labels: the probability of the first, as a text in the middle may have either.
    def first_scores(given: Sequence[_Answer]) -> list[float]:
        return [score if label == labels[0] else 1 - score for label, score in given]

    pairs = [(first_scores(given), given) for given in (answers, expected)]
    scores = [values if is_ordered else sorted(values) for values, _ in pairs]
    for mine, theirs in zip(*scores, strict=True):
        if abs(mine - theirs) > _SCORE_TOLERANCE:
            return f"probability {mine:.3f} of {labels[0]!r} instead of {theirs:.3f}"
    return ""


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
    described = {"labels": bundle.spec.labels, "properties": artifact.properties}
    (folder / GRAPH_FILE).write_text(json.dumps(described))
    return folder
