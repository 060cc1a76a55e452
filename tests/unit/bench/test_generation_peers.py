"""Engines that generate texts beside ours: their orders, and what happens to one that ends."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.bench.generation import SECTION, of_model
from tests.bench.generation_alone import LLAMA
from tests.bench.generation_peers import GENAI, GenerationPeer
from tests.bench.generation_realistic import QWEN, fault_of
from tests.bench.generation_realistic import SECTION as REALISTIC
from tests.bench.measurements import Measurement
from tests.bench.peers.running import PeerProcess
from tests.bench.report import Run, keep_sections, write_report
from tests.bench.systems import FOUR

_LIMIT_S = 60.0


@contextmanager
def _running(generate: str) -> Iterator[PeerProcess]:
    code = f"from tests.bench.peers.generating import answer_orders; answer_orders({generate})"
    with PeerProcess("made up", [sys.executable, "-c", code]) as process:
        process.hear("ready", _LIMIT_S)
        yield process


def _wait_until_stopped(process: PeerProcess) -> None:
    """The signal is on its way where the processes have no CPU."""
    limit_s = time.monotonic() + _LIMIT_S
    while {member.status() for member in process.family()} != {psutil.STATUS_STOPPED}:
        assert time.monotonic() < limit_s
        time.sleep(0.01)


def test_a_peer_answers_orders_and_is_stopped_in_between() -> None:
    unavailable: dict[str, str] = {}
    with _running("lambda prompts, new: [prompt[-1:] * new for prompt in prompts]") as process:
        process.tell({"prompt": [5, 6, 7], "new_tokens": 2})
        assert process.hear("generated", _LIMIT_S)["token_ids"] == [7, 7]
        peer = GenerationPeer("made up", LLAMA, process, unavailable)
        for _ in range(2):
            rate_per_s = peer.measure(LLAMA, 8, 4, 2, 0.01)
            assert rate_per_s
            assert rate_per_s > 0
            _wait_until_stopped(process)
    assert not unavailable


def test_a_peer_that_ends_is_noted_and_not_asked_again() -> None:
    unavailable: dict[str, str] = {}
    with _running("lambda prompts, new: [[7] * (new - 1) for _ in prompts]") as process:
        peer = GenerationPeer("made up", LLAMA, process, unavailable)
        assert peer.measure(LLAMA, 8, 4, 2, 0.01) is None
        assert "a text has 3 new tokens, not 4" in unavailable["made up"]
        assert peer.measure(LLAMA, 8, 4, 2, 0.01) is None


def test_the_page_compares_with_the_peers_and_says_why_one_is_missing(tmp_path: Path) -> None:
    run = Run("python -m tests.bench", {"instructions": "AVX2 yes"}, rounds=1, seconds=1.0)
    run.measurements = [
        Measurement(section=SECTION, system=of_model(LLAMA, system), callers=8, round=0, throughput_per_s=rate_per_s)
        for system, rate_per_s in ((FOUR, 98.0), (GENAI, 100.0))
    ]
    run.unavailable = {"vllm": "cannot be installed", "tei": "is not on the PATH"}
    page = write_report(run, tmp_path)
    assert (
        "| llama, four processes, 8 callers: new tokens/s to openvino-genai's in process | ≥ 0.85 | 0.98 | met |"
        in page
    )
    assert "| llama, openvino-genai | 8 | 100 |" in page
    assert "- vllm: `cannot be installed`" in page
    again = Run("python -m tests.bench", run.machine, rounds=1, seconds=1.0)
    keep_sections(again, tmp_path, ("generation",))
    assert again.unavailable == {"tei": "is not on the PATH"}
    assert not again.measurements


def test_the_page_compares_the_realistic_model_with_the_peers_of_its_dtype(tmp_path: Path) -> None:
    run = Run("python -m tests.bench", {"instructions": "AVX2 yes"}, rounds=1, seconds=1.0)
    run.measurements = [
        Measurement(section=REALISTIC, system=f"{QWEN}, {system}", callers=8, round=0, throughput_per_s=rate_per_s)
        for system, rate_per_s in (
            ("int8-weights, four processes", 48.0),
            ("int8-weights, openvino-genai", 50.0),
            ("bfloat16, openvino-genai", 10.0),
        )
    ]
    page = write_report(run, tmp_path)
    target = f"| {QWEN}, int8-weights, four processes, 8 callers: new tokens/s to openvino-genai's in process |"
    assert f"{target} ≥ 0.95 | 0.96 | met |" in page
    assert f"| {QWEN}, int8-weights, openvino-genai | 8 | 50.0 |  |  | 0.96 |" in page
    # Ours has no turn in this dtype.
    assert f"| {QWEN}, bfloat16, openvino-genai | 8 | 10.0 |  |  |  |" in page


def test_a_token_is_right_as_long_as_rounding_may_have_chosen_it() -> None:
    assert fault_of([0.0, 0.5]) == ""
    assert fault_of([0.0, 0.51, 0.2]) == "a token is 0.51 below the best; the limit is 0.5"
