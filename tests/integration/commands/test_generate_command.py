"""`neuronpipe generate` as people run it: prompts, chats, several texts, log probabilities, summaries."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from demo.processes import ServiceProcess
from neuronpipe.api.v1.tasks_pb2 import EarlyStopping, GeneratedText
from neuronpipe.client import Client
from tests.suite.commands import run

pytestmark = [pytest.mark.local_only, pytest.mark.sampled]

_PROMPT = "A module is a file"
_CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a module?"}]
_TEXT = "The tower was built for an exhibition in Paris."


@pytest.fixture(scope="module")
def target(writers_folder: Path) -> Iterator[str]:
    with ServiceProcess("all", "--repository", str(writers_folder / "repository")) as process:
        yield process.wait_until_ready().target


@pytest.fixture(scope="module")
def client(target: str) -> Iterator[Client]:
    with Client(target, timeout_s=60) as client:
        yield client


def _run(target: str, *options: str, model: str = "writer", text: str = "") -> "subprocess.CompletedProcess[str]":
    return run("generate", "--target", target, "--model", model, *options, text=text)


def _text(client: Client, **options: Any) -> GeneratedText:
    response = [*client.generate("writer", _PROMPT, **options)][-1].response
    return response.result.text_generation.sequences[0]


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() or character in "\n\t" else " " for character in text)


def test_a_text_is_printed_with_the_parts_of_its_time_to_first_token(target: str, client: Client) -> None:
    done = _run(target, "--prompt", _PROMPT, "--max-new-tokens", "12")
    assert done.returncode == 0, done.stderr
    text = client.generate_text("writer", _PROMPT, max_new_tokens=12)
    assert done.stdout == f"{_printable(text.text)}\n"
    tokens, split = done.stderr.splitlines()
    assert tokens.endswith(" + 12 tokens; ended by: length")
    total, parts = split.removeprefix("first token after ").split("; then ")[0].split(" ms = ")
    # Five figures, each rounded to a tenth.
    assert float(total) == pytest.approx(sum(float(part.split()[-1]) for part in parts.split(" + ")), abs=0.3)


def test_a_chat_comes_as_options_as_a_file_or_from_standard_input(target: str, client: Client, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    file.write_text(json.dumps(_CHAT))
    expected = _printable(client.generate_text("writer", messages=_CHAT, max_new_tokens=8).text)
    given = [part for message in _CHAT for part in ("--message", message["role"], message["content"])]
    for options, text in ((given, ""), (["--messages", f"@{file}"], ""), (["--messages", "-"], file.read_text())):
        done = _run(target, *options, "--max-new-tokens", "8", text=text)
        assert (done.returncode, done.stdout) == (0, f"{expected}\n"), done.stderr


def test_several_texts_are_printed_one_after_the_other(target: str, client: Client) -> None:
    options = ["--do-sample", "--seed", "3", "--num-return-sequences", "3", "--max-new-tokens", "6"]
    done = _run(target, "--prompt", _PROMPT, *options)
    assert done.returncode == 0, done.stderr
    *_, last = client.generate("writer", _PROMPT, do_sample=True, seed=3, num_return_sequences=3, max_new_tokens=6)
    texts = [sequence.text for sequence in last.response.result.text_generation.sequences]
    assert done.stdout == "\n---\n".join(map(_printable, texts)) + "\n"
    assert "ended by: length, length, length" in done.stderr


def test_log_probabilities_are_a_table(target: str, client: Client) -> None:
    done = _run(target, "--prompt", _PROMPT, "--max-new-tokens", "4", "--top-logprobs", "2")
    assert done.returncode == 0, done.stderr
    text = _text(client, max_new_tokens=4, top_logprobs=2)
    rows = done.stdout.split("log probabilities:\n")[1].splitlines()
    assert rows[0].split() == ["TOKEN", "LOGPROB", "BEST"]
    assert len(rows) == 5
    for row, token in zip(rows[1:], text.logprobs, strict=True):
        best = " ".join(f"{json.dumps(top.text)} {top.logprob:.3f}" for top in token.top)
        assert row.split() == f"{json.dumps(token.text)} {token.logprob:.3f} {best}".split()


def test_a_text_of_a_beam_search_is_printed_as_a_whole(target: str, client: Client) -> None:
    own: dict[str, Any] = {"max_new_tokens": 8, "num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5}
    own |= {"no_repeat_ngram_size": 2, "forced_bos_token_id": 40, "forced_eos_token_id": 41}
    options = [word for name, value in own.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    first = _text(client, max_new_tokens=8).token_ids
    words = ["--bad-words-ids", str(first[0]), str(first[1]), "--bad-words-ids", str(first[2])]
    done = _run(target, "--prompt", _PROMPT, *options, *words, "--early-stopping", "never")
    never, bad = EarlyStopping.EARLY_STOPPING_NEVER, [first[:2], [first[2]]]
    *_, last = client.generate("writer", _PROMPT, early_stopping=never, bad_words_ids=bad, **own)
    texts = last.response.result.text_generation.sequences
    assert (done.returncode, done.stdout) == (0, "\n---\n".join(_printable(text.text) for text in texts) + "\n")
    assert f"; score: {texts[0].score:.4f}, {texts[1].score:.4f}\n" in done.stderr


def test_a_text_is_summarized_or_translated(target: str, client: Client) -> None:
    done = _run(target, "--text", "-", "--max-new-tokens", "8", model="summarizer", text=_TEXT)
    summary = client.summarize("summarizer", _TEXT, max_new_tokens=8).text
    assert (done.returncode, done.stdout) == (0, f"{_printable(summary)}\n"), done.stderr
    done = _run(target, "--text", _TEXT, "--num-beams", "1", "--max-new-tokens", "8", model="translator")
    translation = client.translate("translator", _TEXT, num_beams=1, max_new_tokens=8).text
    assert (done.returncode, done.stdout) == (0, f"{_printable(translation)}\n"), done.stderr
    done = _run(target, "--text", _TEXT, "--target-language", "de_DE", model="translator")
    assert done.returncode == 1
    assert "target_language" in done.stderr


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--text", "a"], "--text: model 'writer' does not summarize or translate; it supports text-generation"),
        (["--prompt", "a", "--target-language", "de_DE"], "--target-language: is for --text"),
        (["--messages", "{}"], "--messages: must be a list of messages"),
        (["--messages", "["], "--messages: is not JSON"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_does_not_fit_is_named(target: str, options: list[str], problem: str) -> None:
    done = _run(target, *options)
    assert done.returncode == 2
    assert problem in done.stderr
