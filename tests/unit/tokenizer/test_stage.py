"""tokenizer/stage.py: inputs to sequences, each item by itself."""

import asyncio
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from demo.model import find_minilm
from neuronpipe.api.v1.inference_pb2 import CacheOutcome
from neuronpipe.api.v1.stages_pb2 import EncodedInput, ItemContext, TokenizeItem
from neuronpipe.api.v1.tasks_pb2 import (
    FeatureExtractionInput,
    ImageClassificationInput,
    ScoreFunction,
    TaskInput,
    TextClassificationInput,
    Truncation,
)
from neuronpipe.bundles.repository import new_bundle, read_bundle, read_repository, write_manifest
from neuronpipe.core import images
from neuronpipe.core.config import TokenCacheSettings
from neuronpipe.core.errors import DeadlineExceeded, InvalidInput, ModelNotFound, SetupError
from neuronpipe.core.model import ImageSpec
from neuronpipe.core.tensors import Array, to_arrays
from neuronpipe.load.images import make_image
from neuronpipe.tokenizer.stage import Encoder, TokenizerStage, running_tokenizer
from tests.unit.bundles.written import manifest
from tests.unit.model_specs import image_spec, model_spec


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """One model, m, of 16 tokens, with MiniLM's tokenizer."""
    with new_bundle(tmp_path, "m", 1) as folder:
        shutil.copy(find_minilm() / "tokenizer.json", folder)
        write_manifest(folder, manifest())
    return tmp_path


@pytest.fixture
def stage(repository: Path) -> Iterator[TokenizerStage]:
    stage = TokenizerStage(read_repository(repository))
    yield stage
    stage.close()


def _item(text: str = "one two", truncation: "Truncation.ValueType" = Truncation.TRUNCATION_ERROR, **changes: Any) -> TokenizeItem:
    input = TaskInput(text_classification=TextClassificationInput(text=text, truncation=truncation))
    described: dict[str, Any] = {"model": "m", "version": "1", "input": input}
    return TokenizeItem(**described | changes)


async def test_an_input_becomes_sequences_with_their_tokens_counted(stage: TokenizerStage) -> None:
    encoded = await stage.tokenize(_item())
    (sequence,) = encoded.sequences
    # [CLS] one two [SEP] in BERT's vocab.txt.
    assert to_arrays(sequence)["input_ids"].tolist() == [101, 2028, 2048, 102]
    assert (encoded.tokens, encoded.truncated_tokens) == (4, 0)


async def test_tokens_that_were_dropped_are_counted(stage: TokenizerStage) -> None:
    # Twenty tokens and two special ones, for a model of 16. Longer than what is done on the event loop: in the thread.
    item = _item("one " * 20 + " " * 10_000, Truncation.TRUNCATION_RIGHT)
    encoded = await stage.tokenize(item)
    assert (encoded.tokens, encoded.truncated_tokens) == (16, 6)


async def test_no_cache_is_said_to_take_part_where_there_is_none(stage: TokenizerStage) -> None:
    assert (await stage.tokenize(_item())).token_cache == CacheOutcome.CACHE_OUTCOME_UNSPECIFIED


@pytest.mark.parametrize(
    ("bad", "kind"),
    [
        (_item(model="none"), ModelNotFound),
        (_item(""), InvalidInput),
        (_item(context=ItemContext(remaining_ns=1)), DeadlineExceeded),
    ],
    ids=["no such model", "no text", "expired"],
)
async def test_a_bad_item_fails_alone(stage: TokenizerStage, bad: TokenizeItem, kind: type[Exception]) -> None:
    good, failed, better = await asyncio.gather(*(stage.tokenize(item) for item in (_item(), bad, _item())), return_exceptions=True)
    assert (type(good), type(better)) == (EncodedInput, EncodedInput)
    assert isinstance(failed, kind)


def test_a_tokenizer_that_was_changed_is_not_loaded(repository: Path) -> None:
    (repository / "m/1/tokenizer.json").write_text("{}")
    with pytest.raises(SetupError, match="changed since it was compiled"):
        TokenizerStage(read_repository(repository))


def _encoder(folder: Path, *, tokenizer: str = "", **changes: Any) -> Encoder:
    """The encoder of a bundle whose tokenizer.json, or whose model, differs."""
    with new_bundle(folder, "m", 1) as bundle:
        original = (find_minilm() / "tokenizer.json").read_text()
        (bundle / "tokenizer.json").write_text(original.replace('"lowercase":true', tokenizer) if tokenizer else original)
        write_manifest(bundle, manifest(model=model_spec(name="m", **changes)))
    return Encoder(read_bundle(folder / "m/1"))


_INPUT = TextClassificationInput(text="One two", text_pair="three", truncation=Truncation.TRUNCATION_LEFT)


def _key(encoder: Encoder, **changes: Any) -> bytes:
    input = TextClassificationInput()
    input.CopyFrom(_INPUT)
    input.MergeFrom(TextClassificationInput(**changes))
    return encoder.key(TaskInput(text_classification=input))


def test_inputs_that_are_encoded_alike_have_one_key(tmp_path: Path) -> None:
    encoder = _encoder(tmp_path / "a")
    assert _key(encoder) == _key(encoder, top_k=3, function=ScoreFunction.SCORE_FUNCTION_NONE)


def test_what_is_meant_where_nothing_is_said_is_the_same_as_what_is_said(tmp_path: Path) -> None:
    encoder = _encoder(tmp_path)
    unset, error = _item("a", Truncation.TRUNCATION_UNSPECIFIED).input, _item("a", Truncation.TRUNCATION_ERROR).input
    assert encoder.key(unset) == encoder.key(error)


def test_the_same_text_for_two_tasks_of_a_model_has_two_keys(tmp_path: Path) -> None:
    encoder = _encoder(tmp_path, also_answers=("feature_extraction",))
    classification, features = TextClassificationInput(text="One"), FeatureExtractionInput(text="One")
    assert encoder.key(TaskInput(text_classification=classification)) != encoder.key(TaskInput(feature_extraction=features))


def test_models_that_share_a_tokenizer_share_its_keys(tmp_path: Path) -> None:
    assert _key(_encoder(tmp_path / "a")) == _key(_encoder(tmp_path / "b", labels=("other",), architecture="other"))


@pytest.mark.parametrize(
    "changes",
    [{"text": "One two "}, {"text_pair": "four"}, {"truncation": Truncation.TRUNCATION_RIGHT}],
    ids=["text", "pair", "truncation"],
)
def test_inputs_that_may_be_encoded_otherwise_have_other_keys(tmp_path: Path, changes: dict[str, Any]) -> None:
    encoder = _encoder(tmp_path / "a")
    assert _key(encoder) != _key(encoder, **changes)


def test_a_word_does_not_move_from_one_text_to_the_other_unnoticed(tmp_path: Path) -> None:
    encoder = _encoder(tmp_path / "a")
    assert _key(encoder, text="ab", text_pair="c") != _key(encoder, text="a", text_pair="bc")


@pytest.mark.parametrize(
    "changes",
    [
        {"tokenizer": '"lowercase":false'},
        {"max_tokens": 64},
        {"inputs": ("input_ids", "attention_mask")},
        {"cls_token_id": 5},
        {"prompt": "find: "},
        {"mask_token_id": 103},
    ],
    ids=["tokenizer", "max_tokens", "inputs", "cls", "prompt", "mask"],
)
def test_another_tokenizer_and_another_model_have_other_keys(tmp_path: Path, changes: dict[str, Any]) -> None:
    spec: dict[str, Any] = {"inputs": ("input_ids", "attention_mask", "token_type_ids"), "cls_token_id": 101, "max_tokens": 32}
    assert _key(_encoder(tmp_path / "a", **spec)) != _key(_encoder(tmp_path / "b", **spec | changes))


async def test_what_was_encoded_before_is_found_and_is_the_same(repository: Path) -> None:
    async with running_tokenizer(read_repository(repository), TokenCacheSettings()) as stage:
        first, second = await stage.tokenize(_item()), await stage.tokenize(_item())
    assert (first.token_cache, second.token_cache) == (CacheOutcome.CACHE_OUTCOME_MISS, CacheOutcome.CACHE_OUTCOME_HIT_MEMORY)
    assert second.sequences == first.sequences
    (sequence,) = second.sequences
    assert to_arrays(sequence)["input_ids"].tolist() == [101, 2028, 2048, 102]


async def test_an_input_that_decodes_otherwise_is_checked_though_its_encoding_is_known(repository: Path) -> None:
    async with running_tokenizer(read_repository(repository), TokenCacheSettings()) as stage:
        await stage.tokenize(_item())
        bad = _item()
        bad.input.text_classification.top_k = 99
        with pytest.raises(InvalidInput, match="top_k: 99"):
            await stage.tokenize(bad)


async def test_an_expired_item_is_refused_though_its_encoding_is_known(repository: Path) -> None:
    async with running_tokenizer(read_repository(repository), TokenCacheSettings()) as stage:
        await stage.tokenize(_item())
        with pytest.raises(DeadlineExceeded):
            await stage.tokenize(_item(context=ItemContext(remaining_ns=1)))


async def test_there_is_no_cache_without_memory_and_without_redis(repository: Path) -> None:
    async with running_tokenizer(read_repository(repository), TokenCacheSettings(token_cache_bytes=0)) as stage:
        assert [(await stage.tokenize(_item())).token_cache for _ in range(2)] == [CacheOutcome.CACHE_OUTCOME_UNSPECIFIED] * 2


@pytest.fixture
def image_stage(tmp_path: Path) -> Iterator[TokenizerStage]:
    """One model, m, of images of 32 x 48 pixels, which has no tokenizer."""
    with new_bundle(tmp_path, "m", 1) as folder:
        write_manifest(folder, manifest(model=image_spec(name="m"), tokenizer_file=""))
    stage = TokenizerStage(read_repository(tmp_path))
    yield stage
    stage.close()


def _image_item(image: bytes) -> TokenizeItem:
    return TokenizeItem(model="m", input=TaskInput(image_classification=ImageClassificationInput(image=image)))


async def test_an_image_becomes_one_sequence_and_counts_as_its_patches(image_stage: TokenizerStage) -> None:
    encoded = await image_stage.tokenize(_image_item(make_image("one")))
    (sequence,) = encoded.sequences
    assert to_arrays(sequence)["pixels"].shape == (3, 32, 48)
    assert encoded.tokens == 6


async def test_a_small_file_is_decoded_in_the_thread_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set()

    def read_pixels(data: bytes, spec: ImageSpec) -> Array:
        threads.add(threading.current_thread().name)
        return np.zeros((3, *spec.size), np.uint8)

    monkeypatch.setattr(images, "read_pixels", read_pixels)
    with new_bundle(tmp_path, "m", 1) as folder:
        write_manifest(folder, manifest(model=image_spec(name="m"), tokenizer_file=""))
    stage = TokenizerStage([read_bundle(folder.parent / "1")])
    await stage.tokenize(_image_item(b"x"))
    stage.close()
    assert threads == {"tokenize_0"}


async def test_a_broken_image_fails_alone(image_stage: TokenizerStage) -> None:
    items = (_image_item(make_image("one")), _image_item(b"no image"), _image_item(make_image("two")))
    good, failed, better = await asyncio.gather(*(image_stage.tokenize(item) for item in items), return_exceptions=True)
    assert (type(good), type(better)) == (EncodedInput, EncodedInput)
    assert isinstance(failed, InvalidInput)
