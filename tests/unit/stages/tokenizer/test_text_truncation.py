"""stages/tokenizer/text.py: what truncation leaves is what the library's own truncation leaves, token by token, and is
tokenized once.

The library is asked directly, with the truncation of a request as its state.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import Tokenizer

from neuronpipe.api.v1.tasks_pb2 import (
    FillMaskInput,
    TextClassificationInput,
    TokenClassificationInput,
    Truncation,
    ZeroShotClassificationInput,
)
from neuronpipe.stages.tokenizer.text import JsonTokenizer
from neuronpipe.tasks import TASKS
from neuronpipe.tasks.base import Side
from tests.models.tokenizers import TRAINED, byte_level_bpe, unigram_pairs, word_piece
from tests.oracle.texts import PICKED, generated
from tests.unit.model_specs import model_spec

_SEED = 20261122
_TEXTS = (*PICKED, *generated(_SEED, 12, words=(1, 20)))
# Each with one that is longer, shorter or, at the end, as long.
_PAIRS = (*zip(_TEXTS, (*_TEXTS[7:], *_TEXTS[:7]), strict=True), *zip(_TEXTS[:5], _TEXTS[:5], strict=True))
_SIDES: tuple[Side, ...] = ("right", "left")


def _without_special_tokens() -> Any:
    tokenizer = word_piece(max_tokens=512)
    tokenizer.backend_tokenizer.post_processor = None
    return tokenizer


def _kinds() -> dict[str, Callable[[], Any]]:
    kinds: dict[str, Callable[[], Any]] = {name: partial(make, max_tokens=512) for name, make in TRAINED.items()}
    kinds["unigram-pairs"] = partial(unigram_pairs, max_tokens=512)
    kinds["no-special-tokens"] = _without_special_tokens
    kinds["prefix-space"] = partial(byte_level_bpe, max_tokens=512, add_prefix_space=True)
    return kinds


@pytest.fixture(scope="module", params=_kinds())
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param) / "tokenizer.json"
    path.write_text(_kinds()[request.param]().backend_tokenizer.to_str(), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def tokenizer(file: Path) -> JsonTokenizer:
    return JsonTokenizer(file.read_bytes())


@pytest.fixture(scope="module")
def library(file: Path) -> Tokenizer:
    library = Tokenizer.from_file(str(file))
    library.encode_special_tokens = True
    library.no_padding()
    return library


def _limits(whole: int, special: int) -> Iterator[int]:
    """Around the length of a sequence, in its middle, and where hardly anything is left."""
    for limit in sorted(
        {whole + change for change in range(-4, 2)}
        | {special + left for left in range(1, 6)}
        | {(whole + special) // 2}
    ):
        if limit > special:
            yield limit


def _truncated(
    library: Tokenizer, limit: int, side: Side, strategy: str, text: str, pair: str | None
) -> tokenizers.Encoding:
    library.enable_truncation(limit, strategy=strategy, direction=side)
    try:
        return library.encode(text, pair)
    finally:
        library.no_truncation()


@pytest.mark.parametrize("side", _SIDES)
@pytest.mark.parametrize("is_pair", [False, True], ids=["single", "pair"])
def test_a_text_loses_the_tokens_that_the_library_would_leave_out(
    tokenizer: JsonTokenizer, library: Tokenizer, side: Side, is_pair: bool
) -> None:
    cases = 0
    special = library.num_special_tokens_to_add(is_pair)
    for text, pair in _PAIRS if is_pair else [(text, None) for text in _TEXTS]:
        whole = len(library.encode(text, pair).ids)
        for limit in _limits(whole, special):
            expected = _truncated(library, limit, side, "longest_first", text, pair)
            encoded = tokenizer.encode_truncated(text, pair, max_tokens=limit, side=side)
            assert encoded.token_ids.tolist() == expected.ids, (text, pair, limit)
            assert encoded.token_type_ids.tolist() == expected.type_ids, (text, pair, limit)
            assert encoded.truncated_tokens == whole - len(expected.ids), (text, pair, limit)
            cases += 1
    assert cases > 200


@pytest.mark.parametrize("side", _SIDES)
def test_of_a_pair_the_first_text_alone_loses_the_tokens_that_the_library_would_leave_out(
    tokenizer: JsonTokenizer, library: Tokenizer, side: Side
) -> None:
    cases = 0
    special = library.num_special_tokens_to_add(True)
    for text, pair in _PAIRS:
        whole, second = len(library.encode(text, pair).ids), len(library.encode(pair, add_special_tokens=False).ids)
        for limit in _limits(whole, special + second):
            if whole == special + second:  # nothing to lose
                continue
            expected = _truncated(library, limit, side, "only_first", text, pair)
            encoded = tokenizer.encode_truncated(text, pair, max_tokens=limit, side=side, only_first=True)
            assert encoded.token_ids.tolist() == expected.ids, (text, pair, limit)
            assert encoded.token_type_ids.tolist() == expected.type_ids, (text, pair, limit)
            cases += 1
    assert cases > 150


def test_where_the_second_text_leaves_no_room_there_are_too_many_tokens(tokenizer: JsonTokenizer) -> None:
    special = tokenizer.special_tokens(pair=True)
    second = tokenizer.count("one two three")
    encoded = tokenizer.encode_truncated(
        "four five six", "one two three", max_tokens=special + second, side="right", only_first=True
    )
    assert len(encoded.token_ids) == special + second + 1


@pytest.mark.parametrize("side", _SIDES)
def test_a_located_text_loses_the_tokens_that_the_library_would_leave_out(
    tokenizer: JsonTokenizer, library: Tokenizer, side: Side
) -> None:
    cases = 0
    has_prefix_space = '"add_prefix_space":true' in library.to_str()
    for text in _TEXTS:
        located = tokenizer.locate(text)
        for limit in _limits(len(located.token_ids), tokenizer.special_tokens(pair=False)):
            expected = tokenizer._located(_truncated(library, limit, side, "longest_first", text, None), text)
            cut = located.truncated(limit, side)
            assert cut.token_ids.tolist() == expected.token_ids.tolist(), (text, limit)
            assert cut.token_type_ids.tolist() == expected.token_type_ids.tolist(), (text, limit)
            assert cut.truncated_tokens == len(located.token_ids) - len(expected.token_ids), (text, limit)
            # Of a tokenizer that adds a space, the library takes a space of the text before the first token that is
            # left for its own.
            first = 2 if has_prefix_space and side == "left" else 0
            for name in ("char_start", "char_end", "continues_word"):
                found, wanted = getattr(cut, name)[first:], getattr(expected, name)[first:]
                assert found.tolist() == wanted.tolist(), (text, limit, name)
            cases += 1
    assert cases > 200


class _Counting:
    """The library's tokenizer, which counts how often it encodes."""

    def __init__(self, library: Tokenizer) -> None:
        self._library = library
        self.encodings = 0

    def __getattr__(self, name: str) -> Any:
        self.encodings += name.startswith("encode_batch")
        return getattr(self._library, name)


@pytest.mark.parametrize("side", _SIDES)
@pytest.mark.parametrize(
    "task", ["text_classification", "pair", "zero_shot_classification", "token_classification", "fill_mask"]
)
def test_a_cut_text_is_tokenized_once(file: Path, task: str, side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = JsonTokenizer(file.read_bytes())
    counting = _Counting(tokenizer._tokenizer)
    monkeypatch.setattr(tokenizer, "_tokenizer", counting)
    mask_id = tokenizer.encode("+").token_ids.tolist()[-1 if tokenizer.special_tokens(pair=False) == 0 else -2]
    text, truncation = "two " * 40, Truncation.TRUNCATION_RIGHT if side == "right" else Truncation.TRUNCATION_LEFT
    inputs: dict[str, Any] = {
        "text_classification": TextClassificationInput(text=text, truncation=truncation),
        "pair": TextClassificationInput(text=text, text_pair="one " * 30, truncation=truncation),
        "zero_shot_classification": ZeroShotClassificationInput(
            text=text, candidate_labels=["one"], truncation=truncation
        ),
        "token_classification": TokenClassificationInput(text=text, truncation=truncation),
        "fill_mask": FillMaskInput(text=f"+ {text}" if side == "right" else f"{text}+", truncation=truncation),
    }
    name = "text_classification" if task == "pair" else task
    model = model_spec(name, max_tokens=30, **({"mask_token_id": mask_id} if task == "fill_mask" else {}))
    counting.encodings = 0
    encoded = TASKS[name].encode(inputs[task], tokenizer, model)
    assert encoded.truncated_tokens > 0
    assert counting.encodings == 1


def test_a_long_pair_is_cut_without_what_is_cut_off_being_made(tokenizer: JsonTokenizer) -> None:
    # The library's truncation makes a sequence of each part of one text with each of the other: 20,000 of these, which
    # takes 20 s.
    began_s = time.process_time()
    encoded = tokenizer.encode_truncated("one " * 10_000, "two " * 10_000, max_tokens=128, side="right")
    assert len(encoded.token_ids) == 128
    assert time.process_time() - began_s < 5
