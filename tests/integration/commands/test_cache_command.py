"""`neuronpipe cache`: counts, deletes and fills what services share."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from neuronpipe.api.v1.inference_pb2 import CacheOutcome
from neuronpipe.bundles.repository import read_repository
from neuronpipe.cli import main
from neuronpipe.core.calls import Call
from neuronpipe.core.items import ModelKey, TokenizeItem
from neuronpipe.core.metrics import Telemetry
from neuronpipe.core.packed import pack_input
from neuronpipe.platform.cache.settings import RedisSettings
from neuronpipe.stages.settings import EncodingSettings
from neuronpipe.stages.tokenizer.stage import running_tokenizer
from tests.callers.requests import classify
from tests.servers.redis import RedisServer, redis_server
from tests.suite.constants import with_constants

pytestmark = [pytest.mark.local_only, pytest.mark.sampled]


@pytest.fixture
def redis(monkeypatch: pytest.MonkeyPatch) -> Iterator[RedisServer]:
    with redis_server() as server:
        monkeypatch.setenv("NEURONPIPE_CACHE_REDIS_URL", server.url)
        yield server


class Warm(Protocol):
    def __call__(self, *lines: str, model: str = ..., option: str = ...) -> None: ...


@pytest.fixture
def warm(fake_repository: Path, redis: RedisServer, tmp_path: Path) -> Warm:
    """Fills the cache with the lines of a file."""

    def warm(*lines: str, model: str = "classifier", option: str = "--texts") -> None:
        (tmp_path / "lines.txt").write_text("\n".join(lines))
        where = ("--repository", str(fake_repository), "--model", model)
        main(["cache", "warm", *where, option, str(tmp_path / "lines.txt")])

    return warm


def test_texts_are_tokenized_and_stored_once(
    warm: Warm, redis: RedisServer, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ("one", "two", "", "one", *(f"number {number}" for number in range(600)))
    warm(*lines)
    assert capsys.readouterr().out == "603 inputs: 602 stored, 1 there already or given twice, 0 refused\n"
    assert len(redis.stored_keys()) == 602
    warm(*lines)
    assert capsys.readouterr().out == "603 inputs: 0 stored, 603 there already or given twice, 0 refused\n"


async def test_a_tokenizer_finds_what_was_stored_ahead(warm: Warm, fake_repository: Path, redis: RedisServer) -> None:
    await asyncio.to_thread(warm, "a text that is known")
    settings = EncodingSettings(token_cache_redis="always", token_cache_bytes=0)
    shared = with_constants(RedisSettings, redis_url=redis.url, redis_timeout_ms=1000)
    running = running_tokenizer(read_repository(fake_repository), settings, Telemetry(), redis=shared)
    async with running as stage, asyncio.timeout(10):
        while True:
            item = TokenizeItem(Call(), ModelKey("classifier", 1), pack_input(classify("a text that is known").input))
            outcome = (await stage.tokenize(item)).token_cache
            if outcome != CacheOutcome.CACHE_OUTCOME_BYPASS:  # not connected yet
                break
            await asyncio.sleep(0.01)
    assert outcome == CacheOutcome.CACHE_OUTCOME_HIT_REDIS


def test_inputs_with_options_are_given_as_json(warm: Warm, capsys: pytest.CaptureFixture[str]) -> None:
    question = json.dumps({"question_answering": {"question": "Who?", "context": "It was me."}})
    warm(question, model="answerer", option="--inputs")
    assert capsys.readouterr().out.startswith("1 inputs: 1 stored")


def test_an_input_that_would_be_refused_is_named_and_left_out(warm: Warm, capsys: pytest.CaptureFixture[str]) -> None:
    warm("fine", "long " * 2000, "fine too")
    captured = capsys.readouterr()
    assert captured.out == "3 inputs: 2 stored, 0 there already or given twice, 1 refused\n"
    assert "line 2: text: 2002 tokens, the model takes 512" in captured.err


_NO_INPUT = "is not an input of this model"
_GOOD = '{"text_classification": {"text": "a"}}'


@pytest.mark.parametrize(
    ("lines", "model", "option", "problem"),
    [
        (["a"], "answerer", "--texts", "line 1: the model's task takes more than a text; use --inputs"),
        (["{}"], "classifier", "--inputs", f"line 1: {_NO_INPUT}: it is not for the task text-classification"),
        ([_GOOD, "{"], "classifier", "--inputs", f"line 2: {_NO_INPUT}"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused(
    warm: Warm, capsys: pytest.CaptureFixture[str], lines: list[str], model: str, option: str, problem: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        warm(*lines, model=model, option=option)
    assert ended.value.code == 2
    assert problem in capsys.readouterr().err


def test_values_are_counted_by_kind_and_deleted_by_kind(redis: RedisServer, capsys: pytest.CaptureFixture[str]) -> None:
    ours = ("neuronpipe:tokens:a", "neuronpipe:tokens:b", "neuronpipe:pixels:a", "neuronpipe:results:a")
    for name in (*ours, "neuronpipe-2:tokens:a", "other"):
        redis.ask("SET", name, "x" * 1000)
    main(["cache", "stats"])
    counts = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()[1:]}
    assert (counts["tokens"][0], counts["pixels"][0], counts["results"][0]) == ("2", "1", "1")
    assert 2000 < int(counts["tokens"][1].replace(",", "")) < 4000
    main(["cache", "clear", "--kind", "tokens"])
    assert capsys.readouterr().out == "2 values deleted\n"
    others = [b"neuronpipe-2:tokens:a", b"neuronpipe:pixels:a", b"neuronpipe:results:a", b"other"]
    assert sorted(redis.stored_keys()) == others
    main(["cache", "clear"])
    assert sorted(redis.stored_keys()) == [b"neuronpipe-2:tokens:a", b"other"]


def test_signs_in_a_prefix_are_no_pattern(redis: RedisServer, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a*[b]?:tokens:1", "ab:tokens:1", "axb]?:tokens:1"):
        redis.ask("SET", name, "x")
    main(["cache", "clear", "--redis-prefix", "a*[b]?"])
    assert sorted(redis.stored_keys()) == [b"ab:tokens:1", b"axb]?:tokens:1"]


def test_a_redis_that_is_not_there_is_said_to_be(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEURONPIPE_CACHE_REDIS_URL", f"redis://:secret@127.0.0.1:{RedisServer().port}/0")
    with pytest.raises(SystemExit) as ended:
        main(["cache", "stats"])
    assert ended.value.code == 1
    assert capsys.readouterr().err == "neuronpipe: UNAVAILABLE: Redis does not answer (ConnectionError)\n"


@pytest.mark.parametrize(
    "url",
    [
        "http://:secret@h",
        "redis+cluster://:secret@h:6379/3",
        "redis+sentinel://h:1",
        "redis+other://h",
        "redis+sentinel://:secret@h:x/service",
    ],
)
def test_an_address_that_is_none_is_refused_without_repeating_its_password(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEURONPIPE_CACHE_REDIS_URL", url)
    with pytest.raises(SystemExit) as ended:
        main(["cache", "stats"])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("neuronpipe: redis_url: not a Redis URL; it must be one of redis[s]://")
    assert "secret" not in error


def test_an_address_is_asked_for_where_there_is_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NEURONPIPE_CACHE_REDIS_URL", raising=False)
    with pytest.raises(SystemExit):
        main(["cache", "clear"])
    assert capsys.readouterr().err == "neuronpipe: --redis-url: is missing; give the Redis URL of the services\n"
