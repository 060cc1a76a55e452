"""The load generator for real: processes of its own against gateways of these tests."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from demo.processes import ServiceProcess
from neuronpipe.core.errors import SetupError
from neuronpipe.measure.load.report import LoadResult
from neuronpipe.measure.load.request import GenerationLoad, Lengths, LoadRequest
from neuronpipe.measure.load.run import run_load
from tests.suite.commands import output

pytestmark = [pytest.mark.local_only, pytest.mark.sampled]


@pytest.fixture(scope="module")
def target(fake_repository: Path) -> Iterator[str]:
    """A gateway with every stage in one process, over fake models."""
    with ServiceProcess("all", "--repository", str(fake_repository)) as process:
        yield process.wait_until_ready().target


def _check_that_nothing_is_lost(result: LoadResult) -> None:
    assert result.requests == result.answers + sum(result.errors.values()) > 0
    assert sum(result.batch_sizes.values()) == result.answers


def test_closed_loop_measures_every_figure(target: str) -> None:
    lines: list[str] = []
    result = run_load(
        LoadRequest(target=target, model="classifier", concurrency=2, duration_s=0.6, warm_up_s=0.5), lines.append
    )
    _check_that_nothing_is_lost(result)
    assert (result.errors, result.is_broken_off) == ({}, False)
    assert result.throughput_per_s == result.goodput_per_s > 0
    assert result.tokens_per_s > result.throughput_per_s
    assert result.latency_ms is not None
    assert 0 < result.latency_ms.p50 <= result.latency_ms.p99 <= result.latency_ms.max
    # The fake back end computes a padding token more than it is asked for.
    assert result.padding_ratio is not None
    assert 0 < result.padding_ratio < 1
    # Each part of the time was measured by itself; only sums and differences of them could fall below zero.
    assert all(found.p50 >= 0 for found in result.stages_ms.values())
    assert [line.split()[:2] for line in lines] == [["1", "s"]]


@pytest.mark.parametrize("model", ["minilm", "answerer", "tagger", "filler"])
def test_the_input_is_made_for_the_task_of_the_model(target: str, model: str) -> None:
    result = run_load(LoadRequest(target=target, model=model, duration_s=0.1, warm_up_s=0.0))
    _check_that_nothing_is_lost(result)
    assert result.errors == {}


def test_open_loop_of_two_processes_offers_its_rate_with_a_deadline_and_a_priority(target: str) -> None:
    request = LoadRequest(
        target=target, model="classifier", rate_per_s=200.0, duration_s=0.5, warm_up_s=0.0, processes=2, priority="bulk"
    )
    result = run_load(dataclasses.replace(request, deadline_ms=20_000.0))
    _check_that_nothing_is_lost(result)
    assert result.errors == {}
    # 100 are expected, with a standard deviation of 10.
    assert 50 < result.requests < 150
    assert result.offered_per_s == result.requests / 0.5
    assert len(result.cpu_shares) == 2
    assert result.send_lag_ms is not None


def test_unknown_model_is_said(target: str) -> None:
    with pytest.raises(SetupError, match="--model nope: model 'nope' is not served; the served models are: "):
        run_load(LoadRequest(target=target, model="nope"))


def test_ctrl_c_ends_the_run_with_the_report_of_what_was_measured(target: str) -> None:
    load = ("load", "--target", target, "--model", "classifier", "--processes", "2", "--concurrency", "2")
    command = [sys.executable, "-m", "neuronpipe", *load, "--duration", "3600", "--warm-up", "0", "--json", "-"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stderr is not None
        process.stderr.readline()
        # To all of its processes, as a terminal does it.
        os.killpg(process.pid, signal.SIGINT)
        output, errors = process.communicate(timeout=30)
    figures = json.loads(output)
    assert process.returncode == 130
    assert figures["is_broken_off"]
    assert figures["answers"] > 0
    assert "Traceback" not in errors


@pytest.fixture(scope="module")
def writer(writer_folder: Path) -> Iterator[str]:
    """A gateway with a tiny model that generates."""
    with ServiceProcess("all", "--repository", str(writer_folder / "repository")) as process:
        yield process.wait_until_ready().target


def _generate(target: str, load: GenerationLoad, **changes: Any) -> LoadResult:
    request = {"target": target, "model": "writer", "duration_s": 2.0, "warm_up_s": 0.5, "generation": load}
    result = run_load(LoadRequest(**{**request, **changes}))
    _check_that_nothing_is_lost(result)
    assert result.errors == {}
    return result


def test_texts_have_the_lengths_that_are_asked_for(writer: str) -> None:
    load = GenerationLoad(prompt_tokens=Lengths("uniform", 20, 60), output_tokens=Lengths.fixed(12))
    result = _generate(writer, load, concurrency=4, processes=2)
    found = result.generation
    assert found is not None
    assert found.prompt_tokens is not None
    assert found.output_tokens is not None
    assert found.first_token_ms is not None
    assert found.per_token_ms is not None
    assert found.longest_gap_ms is not None
    assert result.latency_ms is not None
    assert (found.output_tokens.p50, found.output_tokens.max) == (12, 12)
    # Two special tokens, and what joining words may change.
    assert 35 < found.prompt_tokens.mean < 50
    assert found.prompt_tokens.max <= 66
    assert found.output_tokens_per_s == pytest.approx(12 * result.throughput_per_s, rel=0.5)
    assert 0 < found.per_token_ms.p50 <= found.longest_gap_ms.p50
    assert found.first_token_ms.p50 < result.latency_ms.p50
    assert found.cached_ratio is not None
    assert found.cached_ratio < 0.1


def test_what_prompts_share_is_computed_once(writer: str) -> None:
    load = GenerationLoad(prompt_tokens=Lengths.fixed(10), output_tokens=Lengths.fixed(2), shared_prefix_tokens=100)
    found = _generate(writer, load).generation
    assert found is not None
    assert found.cached_ratio is not None
    # 96 of 112 tokens are whole blocks of 32.
    assert found.cached_ratio > 0.75


def test_the_command_prints_the_times_of_tokens_and_writes_them(writer: str, tmp_path: Path) -> None:
    command = ("load", "--target", writer, "--model", "writer", "--generate")
    options = ["--duration", "1", "--prompt-tokens", "lognormal:20,40", "--output-tokens", "uniform:4,8"]
    options += ["--ttft-ms", "20000", "--itl-ms", "20000", "--json", str(tmp_path / "figures.json")]
    said = output(*command, *options)
    assert "goodput counts answers with the first token within 20000 ms and the time per token within 20000 ms" in said
    for name in ("first token (TTFT)", "between parts (ITL)", "per token (TPOT)", "longest gap", "new tokens"):
        assert f"\n{name} " in said
    figures = json.loads((tmp_path / "figures.json").read_text())["generation"]
    assert 4 <= figures["output_tokens"]["mean"] <= figures["output_tokens"]["max"] <= 8
    assert figures["first_token_ms"]["p99"] > 0
