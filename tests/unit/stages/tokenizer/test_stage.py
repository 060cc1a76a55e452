"""stages/tokenizer/stage.py: inputs to sequences, each item by itself."""

import asyncio
import gc
import shutil
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from demo.model import find_minilm
from neuronpipe.api.v1.inference_pb2 import CacheOutcome
from neuronpipe.api.v1.tasks_pb2 import (
    FeatureExtractionInput,
    ImageClassificationInput,
    ScoreFunction,
    TaskInput,
    TextClassificationInput,
    TextGenerationInput,
    Truncation,
)
from neuronpipe.bundles.repository import read_bundle, read_repository
from neuronpipe.bundles.writing import new_bundle, write_manifest
from neuronpipe.core.calls import Call
from neuronpipe.core.errors import DeadlineExceeded, InvalidInput, ModelNotFound, RefusedBundle, SetupError
from neuronpipe.core.items import EncodedInput, ModelKey, TokenizeItem
from neuronpipe.core.metrics import Telemetry
from neuronpipe.core.model import ImageSpec
from neuronpipe.core.packed import Packed, pack_input
from neuronpipe.core.tensors import Array
from neuronpipe.measure.load.inputs import make_image
from neuronpipe.stages.settings import EncodingSettings
from neuronpipe.stages.tokenizer.encoder import Encoder
from neuronpipe.stages.tokenizer.stage import TokenizerStage, running_tokenizer
from neuronpipe.stages.tokenizer.text import LONG_TEXT
from neuronpipe.tasks.inputs import images
from tests.unit.bundles.written import manifest
from tests.unit.model_specs import image_spec, model_spec


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """One model, m, of 16 tokens, with MiniLM's tokenizer."""
    with new_bundle(tmp_path, "m", 1) as folder:
        shutil.copy(find_minilm() / "tokenizer.json", folder)
        write_manifest(folder, manifest())
    return tmp_path


_NO_CACHE = EncodingSettings(token_cache_bytes=0)
_EXPIRED = Call(deadline_s=0.0)


@pytest.fixture
async def stage(repository: Path) -> AsyncIterator[TokenizerStage]:
    async with running_tokenizer(read_repository(repository), _NO_CACHE, Telemetry()) as stage:
        yield stage


def _item(
    text: str = "one two",
    truncation: "Truncation.ValueType" = Truncation.TRUNCATION_ERROR,
    *,
    model: str = "m",
    call: Call | None = None,
) -> TokenizeItem:
    input = TaskInput(text_classification=TextClassificationInput(text=text, truncation=truncation))
    return TokenizeItem(call or Call(), ModelKey(model, 1), pack_input(input))


def _ids(encoded: EncodedInput) -> list[list[int]]:
    return [sequence["input_ids"].tolist() for sequence in encoded.sequences.arrays]


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        (b"", r"cannot be read \(JSONDecodeError\)"),
        (b"{}", r"cannot be read \(KeyError\)"),
        (b"[]", r"cannot be read \(TypeError\)"),
        (b"\xff", r"cannot be read \(UnicodeDecodeError\)"),
        (b'{"normalizer": null, "model": {}}', r"cannot be read \(.*Error|Exception\)"),
    ],
)
async def test_a_tokenizer_whose_digest_was_made_to_match_is_refused_by_its_name(
    written: bytes, problem: str, tmp_path: Path
) -> None:
    with new_bundle(tmp_path, "m", 1) as folder:
        (folder / "tokenizer.json").write_bytes(written)
        write_manifest(folder, manifest())
    with pytest.raises(RefusedBundle, match=rf"{tmp_path}/m/1/tokenizer\.json: {problem}"):
        async with running_tokenizer(read_repository(tmp_path), _NO_CACHE, Telemetry()):
            pass


async def test_an_input_becomes_sequences_with_their_tokens_counted(stage: TokenizerStage) -> None:
    encoded = await stage.tokenize(_item())
    # [CLS] one two [SEP] in BERT's vocab.txt.
    assert _ids(encoded) == [[101, 2028, 2048, 102]]
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
    [(_item(model="none"), ModelNotFound), (_item(""), InvalidInput), (_item(call=_EXPIRED), DeadlineExceeded)],
    ids=["no such model", "no text", "expired"],
)
async def test_a_bad_item_fails_alone(stage: TokenizerStage, bad: TokenizeItem, kind: type[Exception]) -> None:
    good, failed, better = await asyncio.gather(
        *(stage.tokenize(item) for item in (_item(), bad, _item())), return_exceptions=True
    )
    assert (type(good), type(better)) == (EncodedInput, EncodedInput)
    assert isinstance(failed, kind)


async def test_a_tokenizer_that_was_changed_is_not_loaded(repository: Path) -> None:
    (repository / "m/1/tokenizer.json").write_text("{}")
    with pytest.raises(SetupError, match="changed since it was compiled"):
        async with running_tokenizer(read_repository(repository), _NO_CACHE, Telemetry()):
            pass


def _encoder(folder: Path, *, tokenizer: str = "", **changes: Any) -> Encoder:
    """The encoder of a bundle whose tokenizer.json, or whose model, differs."""
    with new_bundle(folder, "m", 1) as bundle:
        original = (find_minilm() / "tokenizer.json").read_text()
        (bundle / "tokenizer.json").write_text(
            original.replace('"lowercase":true', tokenizer) if tokenizer else original
        )
        write_manifest(bundle, manifest(model=model_spec(name="m", **changes)))
    return Encoder(read_bundle(folder / "m/1"))


_INPUT = TextClassificationInput(text="One two", text_pair="three", truncation=Truncation.TRUNCATION_LEFT)


def _key(encoder: Encoder, **changes: Any) -> bytes:
    input = TextClassificationInput()
    input.CopyFrom(_INPUT)
    input.MergeFrom(TextClassificationInput(**changes))
    return encoder.key(pack_input(TaskInput(text_classification=input)))


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
    assert encoder.key(pack_input(TaskInput(text_classification=classification))) != encoder.key(
        pack_input(TaskInput(feature_extraction=features))
    )


def test_long_texts_have_the_same_key_only_if_they_are_equal(tmp_path: Path) -> None:
    encoder, long = _encoder(tmp_path), "a" * (LONG_TEXT + 1)
    keys = [_key(encoder, text=long), _key(encoder, text=f"{long}b"), _key(encoder, text="a", text_pair=long)]
    assert len({*keys, _key(encoder, text=long[:-1])}) == 4
    assert _key(encoder, text=long) == keys[0]


def test_models_that_share_a_tokenizer_share_its_keys(tmp_path: Path) -> None:
    other = _encoder(tmp_path / "b", labels=("other",), architecture="other", score_function="none")
    assert _key(_encoder(tmp_path / "a")) == _key(other)


@pytest.mark.parametrize(
    "changes",
    [
        {"text": "One two "},
        {"text_pair": "four"},
        {"truncation": Truncation.TRUNCATION_RIGHT},
        {"truncation_tokens": 8},
    ],
    ids=["text", "pair", "truncation", "tokens"],
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
    tasks = ("question_answering", "rerank", "fill_mask")
    inputs = ("input_ids", "attention_mask", "token_type_ids")
    spec: dict[str, Any] = {"also_answers": tasks, "inputs": inputs, "cls_token_id": 101, "max_tokens": 32}
    assert _key(_encoder(tmp_path / "a", **spec)) != _key(_encoder(tmp_path / "b", **spec | changes))


def test_special_tokens_in_texts_have_other_keys(tmp_path: Path) -> None:
    plain = _encoder(tmp_path / "a")
    assert _key(plain) != _key(Encoder(read_bundle(tmp_path / "a/m/1"), reads_special_tokens=True))


@pytest.mark.parametrize(("models", "reads"), [("", False), ("other", False), ("other, m", True), ("*", True)])
async def test_special_tokens_in_texts_are_read_where_the_setting_names_the_model(
    repository: Path, models: str, reads: bool
) -> None:
    settings = EncodingSettings(special_tokens_in_texts=models)
    async with running_tokenizer(read_repository(repository), settings, Telemetry()) as stage:
        [ids] = _ids(await stage.tokenize(_item("one[SEP]two")))
    assert (ids == [101, 2028, 102, 2048, 102]) is reads


@pytest.mark.parametrize(
    ("kept", "side", "expected"),
    [
        (3, Truncation.TRUNCATION_RIGHT, [101, 2028, 102]),
        (3, Truncation.TRUNCATION_LEFT, [101, 2048, 102]),
        (99, Truncation.TRUNCATION_LEFT, [101, 2028, 2048, 102]),
    ],
)
def test_an_input_is_cut_to_as_many_tokens_as_it_asks_for(
    tmp_path: Path, kept: int, side: "Truncation.ValueType", expected: list[int]
) -> None:
    input = TextClassificationInput(text="one two", truncation=side, truncation_tokens=kept)
    encoded = _encoder(tmp_path).encode(pack_input(TaskInput(text_classification=input)))
    assert _ids(encoded) == [expected]
    assert encoded.truncated_tokens == 4 - len(expected)


def test_a_prompt_is_cut_to_as_many_tokens_as_it_asks_for_beside_the_new_ones(tmp_path: Path) -> None:
    encoder = _encoder(tmp_path, task="text_generation", max_tokens=16)
    input = TextGenerationInput(prompt="one two", truncation=Truncation.TRUNCATION_LEFT, truncation_tokens=3)
    input.options.max_new_tokens = 12
    assert _ids(encoder.encode(pack_input(TaskInput(text_generation=input)))) == [[101, 2048, 102]]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"truncation_tokens": 8, "truncation": Truncation.TRUNCATION_ERROR}, "truncation_tokens: is for truncation"),
        ({"truncation_tokens": 3}, "text and text_pair: 3 special tokens leave no room for text, the limit is 3"),
    ],
)
async def test_a_length_to_which_nothing_can_be_cut_is_refused(
    stage: TokenizerStage, changes: dict[str, Any], problem: str
) -> None:
    input = TextClassificationInput()
    input.CopyFrom(_INPUT)
    for name, value in changes.items():
        setattr(input, name, value)
    packed = pack_input(TaskInput(text_classification=input))
    with pytest.raises(InvalidInput, match=problem):
        await stage.tokenize(TokenizeItem(Call(), ModelKey("m", 1), packed))


async def test_what_was_encoded_before_is_found_and_is_the_same(repository: Path) -> None:
    async with running_tokenizer(read_repository(repository), EncodingSettings(), Telemetry()) as stage:
        first, second = await stage.tokenize(_item()), await stage.tokenize(_item())
    expected = (CacheOutcome.CACHE_OUTCOME_MISS, CacheOutcome.CACHE_OUTCOME_HIT_MEMORY)
    assert (first.token_cache, second.token_cache) == expected
    assert _ids(second) == _ids(first) == [[101, 2028, 2048, 102]]
    assert (second.tokens, second.truncated_tokens) == (first.tokens, first.truncated_tokens)


async def test_an_input_that_decodes_otherwise_is_checked_though_its_encoding_is_known(repository: Path) -> None:
    async with running_tokenizer(read_repository(repository), EncodingSettings(), Telemetry()) as stage:
        await stage.tokenize(_item())
        bad = _item()
        bad.input.message.text_classification.top_k = 99
        with pytest.raises(InvalidInput, match="top_k: 99"):
            await stage.tokenize(bad)


async def test_an_expired_item_is_refused_though_its_encoding_is_known(repository: Path) -> None:
    async with running_tokenizer(read_repository(repository), EncodingSettings(), Telemetry()) as stage:
        await stage.tokenize(_item())
        with pytest.raises(DeadlineExceeded):
            await stage.tokenize(_item(call=_EXPIRED))


async def test_there_is_no_cache_without_memory_and_without_redis(repository: Path) -> None:
    async with running_tokenizer(
        read_repository(repository), EncodingSettings(token_cache_bytes=0), Telemetry()
    ) as stage:
        expected = [CacheOutcome.CACHE_OUTCOME_UNSPECIFIED] * 2
        assert [(await stage.tokenize(_item())).token_cache for _ in range(2)] == expected


@pytest.fixture
def image_repository(tmp_path: Path) -> Path:
    """One model, images, of images of 32 x 48 pixels, which has no tokenizer."""
    with new_bundle(tmp_path, "images", 1) as folder:
        write_manifest(folder, manifest("images", model=image_spec(name="images"), tokenizer_file=""))
    return tmp_path


@pytest.fixture
async def image_stage(image_repository: Path) -> AsyncIterator[TokenizerStage]:
    async with running_tokenizer(read_repository(image_repository), _NO_CACHE, Telemetry()) as stage:
        yield stage


def _image_item(image: bytes) -> TokenizeItem:
    input = TaskInput(image_classification=ImageClassificationInput(image=image))
    return TokenizeItem(Call(), ModelKey("images", 1), Packed(TaskInput, data=input.SerializeToString()))


async def test_an_image_becomes_one_sequence_and_counts_as_its_patches(image_stage: TokenizerStage) -> None:
    encoded = await image_stage.tokenize(_image_item(make_image("one")))
    (sequence,) = encoded.sequences.arrays
    assert sequence["pixels"].shape == (3, 32, 48)
    assert encoded.tokens == 6


class _Reading:
    """In the place of images.read_pixels: says in which threads it was called, and ends when it is let."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: list[str] = []
        self.began, self.may_end = threading.Event(), threading.Event()
        monkeypatch.setattr(images, "read_pixels", self)

    def __call__(self, data: bytes, spec: ImageSpec, turn: object) -> Array:
        self.threads.append(threading.current_thread().name)
        self.began.set()
        self.may_end.wait(10)
        return np.zeros((3, *spec.size), np.uint8)


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> _Reading:
    return _Reading(monkeypatch)


async def test_a_small_file_is_decoded_in_a_thread_too(image_repository: Path, reading: _Reading) -> None:
    reading.may_end.set()
    async with running_tokenizer(read_repository(image_repository), _NO_CACHE, Telemetry()) as stage:
        await stage.tokenize(_image_item(b"x"))
    assert [name.startswith("tokenize") for name in reading.threads] == [True]


async def test_a_broken_image_fails_alone(image_stage: TokenizerStage) -> None:
    items = (_image_item(make_image("one")), _image_item(b"no image"), _image_item(make_image("two")))
    good, failed, better = await asyncio.gather(*(image_stage.tokenize(item) for item in items), return_exceptions=True)
    assert (type(good), type(better)) == (EncodedInput, EncodedInput)
    assert isinstance(failed, InvalidInput)


async def test_images_of_one_model_do_not_delay_texts_of_another(
    repository: Path, image_repository: Path, reading: _Reading
) -> None:
    async with running_tokenizer(read_repository(repository), EncodingSettings(), Telemetry()) as stage:
        queued = [asyncio.create_task(stage.tokenize(_image_item(b"image %d" % number))) for number in range(20)]
        await asyncio.to_thread(reading.began.wait, 10)
        short = await asyncio.wait_for(stage.tokenize(_item()), 5)
        long = await asyncio.wait_for(stage.tokenize(_item("one " * 20 + " " * 10_000, Truncation.TRUNCATION_RIGHT)), 5)
        assert not any(task.done() for task in queued)
        reading.may_end.set()
        await asyncio.gather(*queued)
    assert (short.tokens, long.tokens) == (4, 16)


async def test_a_short_text_does_not_wait_for_a_long_one_of_its_model(stage: TokenizerStage) -> None:
    long = asyncio.create_task(stage.tokenize(_item("word " * 400_000, Truncation.TRUNCATION_RIGHT)))
    await asyncio.sleep(0.05)  # its thread has begun
    for number in range(10):
        await stage.tokenize(_item(f"short {number}"))
    assert not long.done()
    await long


async def test_a_known_image_does_not_wait_for_unknown_images(image_repository: Path, reading: _Reading) -> None:
    # Large enough to be hashed in a thread.
    known = _image_item(bytes(100_000))
    async with running_tokenizer(read_repository(image_repository), EncodingSettings(), Telemetry()) as stage:
        reading.may_end.set()
        await stage.tokenize(known)
        reading.may_end.clear()
        reading.began.clear()
        queued = [asyncio.create_task(stage.tokenize(_image_item(b"image %d" % number))) for number in range(20)]
        await asyncio.to_thread(reading.began.wait, 10)
        found = await asyncio.wait_for(stage.tokenize(known), 5)
        reading.may_end.set()
        await asyncio.gather(*queued)
    assert found.token_cache == CacheOutcome.CACHE_OUTCOME_HIT_MEMORY


@pytest.mark.parametrize(("size_bytes", "is_on_loop"), [(1000, True), (10 << 20, False)])
async def test_a_large_image_is_parsed_checked_and_hashed_off_the_event_loop(
    image_repository: Path, monkeypatch: pytest.MonkeyPatch, size_bytes: int, is_on_loop: bool
) -> None:
    threads: list[int] = []

    def noted(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            threads.append(threading.get_ident())
            return method(*args)

        return call

    for name in ("check", "key"):
        monkeypatch.setattr(Encoder, name, noted(getattr(Encoder, name)))
    monkeypatch.setattr(Packed, "message", property(noted(Packed.message.fget)))  # type: ignore[attr-defined]
    async with running_tokenizer(read_repository(image_repository), EncodingSettings(), Telemetry()) as stage:
        with pytest.raises(InvalidInput, match="is not a JPEG"):
            await stage.tokenize(_image_item(bytes(size_bytes)))
    # The last look at the message is that of the encoding, which is always in a thread.
    assert [thread == threading.get_ident() for thread in threads] == [is_on_loop] * 4 + [False]


async def test_images_do_not_drive_texts_out_of_the_cache(repository: Path, image_repository: Path) -> None:
    settings = EncodingSettings(token_cache_bytes=1 << 20)
    async with running_tokenizer(read_repository(repository), settings, Telemetry()) as stage:
        await stage.tokenize(_item())
        # Pixels of 4.6 KB: three times what either cache holds.
        for number in range(700):
            await stage.tokenize(_image_item(make_image(f"image {number}")))
        assert (await stage.tokenize(_item())).token_cache == CacheOutcome.CACHE_OUTCOME_HIT_MEMORY


async def test_images_are_not_kept_without_memory_for_them(image_repository: Path) -> None:
    async with running_tokenizer(read_repository(image_repository), _NO_CACHE, Telemetry()) as stage:
        outcomes = [(await stage.tokenize(_image_item(make_image("one")))).token_cache for _ in range(2)]
    assert outcomes == [CacheOutcome.CACHE_OUTCOME_UNSPECIFIED] * 2


async def test_what_several_callers_get_cannot_be_changed(repository: Path, image_repository: Path) -> None:
    async with running_tokenizer(read_repository(repository), EncodingSettings(), Telemetry()) as stage:
        for item in (_item(), _image_item(make_image("one"))):
            for encoded in (await stage.tokenize(item), await stage.tokenize(item)):
                assert not any(
                    array.flags.writeable for sequence in encoded.sequences.arrays for array in sequence.values()
                )


async def test_a_serialized_form_that_a_caller_makes_is_not_kept_by_the_cache(repository: Path) -> None:
    async with running_tokenizer(read_repository(repository), EncodingSettings(), Telemetry()) as stage:
        first, second = [(await stage.tokenize(_item())).sequences.data for _ in range(2)]
    assert first == second
    assert first is not second


async def test_a_closed_model_is_freed_while_others_are_served(repository: Path, image_repository: Path) -> None:
    text, image = read_bundle(repository / "m/1"), read_bundle(image_repository / "images/1")
    async with running_tokenizer([image], _NO_CACHE, Telemetry()) as stage:
        await stage.models.open(text)
        assert stage.models.keys == {("m", 1), ("images", 1)}
        assert (await stage.tokenize(_item())).tokens == 4
        freed = weakref.ref(stage.models.table.find("m", "1").resource)
        await stage.models.close(ModelKey("m", 1))
        gc.collect()
        assert freed() is None
        with pytest.raises(ModelNotFound):
            await stage.tokenize(_item())
        assert (await stage.tokenize(_image_item(make_image("one")))).tokens == 6


async def test_a_model_is_closed_when_the_last_input_is_encoded(image_repository: Path, reading: _Reading) -> None:
    async with running_tokenizer(read_repository(image_repository), _NO_CACHE, Telemetry()) as stage:
        last = asyncio.create_task(stage.tokenize(_image_item(b"x")))
        await asyncio.to_thread(reading.began.wait, 10)
        closing = asyncio.create_task(stage.models.close(ModelKey("images", 1)))
        await asyncio.sleep(0.01)
        assert not closing.done()
        reading.may_end.set()
        assert (await last).tokens == 6
        await closing
