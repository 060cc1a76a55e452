"""The demo leaves nothing running, however it ends."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from demo.model import is_compiled
from demo.writer import make_writer, paragraphs
from tests.models.compiling import compile_model
from tests.models.repository import link_models
from tests.suite.shared_folder import shared_folder

pytestmark = [pytest.mark.local_only, pytest.mark.sampled]

SERVICE_LINE = re.compile(r"^  ([a-z-]+) +127\.0\.0\.1:\d+ +pid (\d+)$")


def _make_writer(folder: Path) -> None:
    source = str(make_writer(folder / "source"))
    compile_model(source, folder / "repository", name="writer", dtype="")


@contextmanager
def _running_demo(folder: Path, repository: Path, writer: Path) -> Iterator["subprocess.Popen[str]"]:
    """The demo on a repository that holds its models already."""
    linked = link_models(folder / "repository", repository, "minilm")
    (linked / "writer").symlink_to(writer)
    command = [sys.executable, "-m", "demo", "--repository", str(linked)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture(scope="module")
def output(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the demo says, with its own writer, which takes half a minute to train."""
    writer = shared_folder(tmp_path_factory, "demo-writer", _make_writer) / "repository" / "writer"
    with _running_demo(tmp_path_factory.mktemp("demo"), repository, writer) as process:
        said, _ = process.communicate(timeout=240)
    assert process.returncode == 0, said
    return said


@pytest.fixture
def demo_that_ends_early(repository: Path, writer_folder: Path, tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """The demo with a writer that learned nothing."""
    with _running_demo(tmp_path, repository, writer_folder / "repository" / "writer") as process:
        yield process


def test_demo_compiles_where_an_interrupted_compilation_left_its_files(tmp_path: Path, fake_repository: Path) -> None:
    assert not is_compiled(tmp_path, "minilm")
    shutil.copytree(fake_repository / "minilm" / "1", tmp_path / "minilm" / ".1.abcdefgh")
    assert not is_compiled(tmp_path, "minilm")
    shutil.copytree(fake_repository / "minilm" / "1", tmp_path / "minilm" / "1")
    assert is_compiled(tmp_path, "minilm")


@pytest.mark.long
def test_demo_shows_similar_pairs_and_the_latency_split(output: str) -> None:
    assert "How do I reset my password?  |  I forgot my login and cannot get into my account." in output
    [scores] = re.findall(r"\$ curl .* http://127\.0\.0\.1:\d+/similarity -H .*\n  (\[.*\])\n", output)
    alike, unlike = json.loads(scores)  # two sentences about a cat, and one about interest rates
    assert alike > unlike
    splits = re.findall(
        r"(four processes|one process) +(cold|warm) +([\d.]+) = +([\d.]+) \+ +([\d.]+) \+ +([\d.]+) \+ +([\d.]+)",
        output,
    )
    assert len(splits) == 4
    for *_, total, preprocess, predict, postprocess, rest in splits:
        parts = sum(map(float, (preprocess, predict, postprocess, rest)))
        # Five figures, each rounded to a hundredth.
        assert float(total) == pytest.approx(parts, abs=0.03)


@pytest.mark.long
def test_demo_streams_a_text_and_shows_the_parts_of_its_time_to_first_token(output: str) -> None:
    text, tokens, total, *parts = re.findall(
        r"comes as it is written:\n\n(.*)\n(\d+ \+ 60) tokens; ended by: length\nfirst token after ([\d.]+) ms = "
        r"pre-process ([\d.]+) \+ queue ([\d.]+) \+ prefill ([\d.]+) \+ hops ([\d.]+);",
        output,
        re.DOTALL,
    )[0]
    assert tokens.endswith("60")
    # It writes what it was trained on, English sentences: a model that was not, or on other texts, has other words.
    words = re.findall(r"[a-z]+", text.lower())
    known = set(re.findall(r"[a-z]+", " ".join(paragraphs()).lower()))
    assert len(words) > 30
    assert len(set(words)) > 15
    assert [word for word in words[1:-1] if word not in known] == []  # the first and the last may be parts of words
    assert float(total) == pytest.approx(sum(map(float, parts)), abs=0.3)


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_demo_ends_its_services_when_it_is_interrupted(
    demo_that_ends_early: "subprocess.Popen[str]", number: signal.Signals, exit_code: int
) -> None:
    pids = read_pids(demo_that_ends_early)

    demo_that_ends_early.send_signal(number)

    output, _ = demo_that_ends_early.communicate(timeout=60)
    assert demo_that_ends_early.returncode == exit_code, output
    assert [pid for pid in pids.values() if is_running(pid)] == []


def test_demo_ends_its_services_when_it_fails(demo_that_ends_early: "subprocess.Popen[str]") -> None:
    pids = read_pids(demo_that_ends_early)

    os.kill(pids["neuron-executor"], signal.SIGKILL)

    output, _ = demo_that_ends_early.communicate(timeout=60)
    assert demo_that_ends_early.returncode == 1
    assert "the neuron-executor service cannot be reached" in output
    assert [pid for pid in pids.values() if is_running(pid)] == []


def read_pids(demo: "subprocess.Popen[str]") -> dict[str, int]:
    """Reads the demo's output until it has named its five processes."""
    pids: dict[str, int] = {}
    assert demo.stdout is not None
    for line in demo.stdout:
        found = SERVICE_LINE.match(line)
        if found:
            pids[found[1]] = int(found[2])
        if len(pids) == 5:
            return pids
    raise AssertionError(f"the demo ended after naming {pids}")


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
