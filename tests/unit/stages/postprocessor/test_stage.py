"""stages/postprocessor/stage.py: outputs to results, each item by itself."""

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from neuronpipe.api.v1.tasks_pb2 import (
    FinishReason,
    GenerationOptions,
    TaskInput,
    TaskResult,
    TextClassificationInput,
    TextGenerationInput,
)
from neuronpipe.api.v1.tensors_pb2 import DataType, Tensor, TensorSet
from neuronpipe.bundles.repository import read_bundle, read_repository
from neuronpipe.bundles.writing import new_bundle, write_manifest
from neuronpipe.core.calls import Call
from neuronpipe.core.errors import DeadlineExceeded, InvalidInput, ModelNotFound, RefusedBundle
from neuronpipe.core.items import DetokenizeItem, ModelKey, PostprocessItem
from neuronpipe.core.packed import NO_TENSORS, Packed, TensorSets, pack_input
from neuronpipe.platform.process.lanes import Lanes
from neuronpipe.stages.postprocessor.detokenizer import load_detokenizer
from neuronpipe.stages.postprocessor.stage import DecodingModel, PostprocessorStage, running_postprocessor
from neuronpipe.tasks import ANSWERED_TASKS
from neuronpipe.tasks.text_generation import part_arrays, window_arrays
from tests.models.tokenizers import byte_level_bpe, unigram, word_piece
from tests.unit.bundles.written import manifest, write_bundle
from tests.unit.model_specs import model_spec

_KEY = ModelKey("small", 1)


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[PostprocessorStage]:
    write_bundle(tmp_path)
    async with running_postprocessor(read_repository(tmp_path)) as stage:
        yield stage


@pytest.mark.parametrize("written", ["", "{}", "[1]", '["a", null]', "null"])
async def test_tokens_whose_digest_was_made_to_match_are_refused_by_their_name(written: str, tmp_path: Path) -> None:
    with new_bundle(tmp_path, "m", 1) as folder:
        (folder / "tokens.json").write_text(written)
        write_manifest(folder, manifest(tokens_file="tokens.json"))
    with pytest.raises(RefusedBundle, match=rf"{tmp_path}/m/1/tokens\.json: cannot be read"):
        async with running_postprocessor(read_repository(tmp_path)):
            pass


_LOGITS = TensorSets(arrays=[{"logits": np.array([0, 5, 1], np.float32)}])
_TOO_MANY = TensorSets(arrays=[{"logits": np.array([0, 5, 1], np.float32), "x": np.array([1], np.float32)}])
_NO_TENSOR = TensorSet(tensors=[Tensor(data_type=DataType.DATA_TYPE_INT32, shape=[1])]).SerializeToString()


def _item(
    text: str = "x", *, model: str = "m", call: Call | None = None, outputs: TensorSets = _LOGITS
) -> PostprocessItem:
    input = pack_input(TaskInput(text_classification=TextClassificationInput(text=text)))
    return PostprocessItem(call or Call(), ModelKey(model, 1), input, NO_TENSORS, outputs)


@pytest.mark.parametrize("text", ["x", "x" * 100_000], ids=["on the event loop", "in a thread"])
async def test_outputs_become_the_tasks_result(stage: PostprocessorStage, text: str) -> None:
    result = await stage.postprocess(_item(text))
    assert [label.label for label in result.message.text_classification.labels] == ["b"]


@pytest.mark.parametrize(
    ("bad", "kind"),
    [
        (_item(model="none"), ModelNotFound),
        (_item(call=Call(deadline_s=0.0)), DeadlineExceeded),
        (_item(outputs=TensorSets(data=[_NO_TENSOR])), InvalidInput),
        (_item(outputs=NO_TENSORS), InvalidInput),
        (_item(outputs=_TOO_MANY), InvalidInput),
    ],
    ids=["no such model", "expired", "no tensor", "no outputs", "outputs of another model"],
)
async def test_a_bad_item_fails_alone(stage: PostprocessorStage, bad: PostprocessItem, kind: type[Exception]) -> None:
    good, failed, better = await asyncio.gather(
        *(stage.postprocess(item) for item in (_item(), bad, _item())), return_exceptions=True
    )
    assert (type(good), type(better)) == (Packed, Packed)
    assert isinstance(failed, kind)


async def test_a_deadline_that_passes_after_the_prediction_is_not_before_the_work(stage: PostprocessorStage) -> None:
    with pytest.raises(DeadlineExceeded, match=r"^the deadline passed before the result was ready$"):
        await stage.postprocess(_item(call=Call(deadline_s=0.0)))


async def test_a_large_result_is_serialized_off_the_event_loop(
    stage: PostprocessorStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop_thread, threads = threading.get_ident(), []
    data = Packed.data

    def noted(packed: Packed[TaskResult]) -> bytes:
        if packed._kind is TaskResult:
            threads.append(threading.get_ident())
        serialized: bytes = data.fget(packed)  # type: ignore[attr-defined]
        return serialized

    monkeypatch.setattr(Packed, "data", property(noted))
    result = await stage.postprocess(_item("x" * 100_000))
    assert threads
    assert loop_thread not in threads
    monkeypatch.setattr(result, "_message", None)
    assert result.size_bytes > 0


async def test_long_work_of_one_model_does_not_delay_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("m", "other"):
        write_bundle(tmp_path, name)
    task, began, released = ANSWERED_TASKS["text_classification"], threading.Event(), threading.Event()

    def decode(input: TextClassificationInput, *args: Any) -> Any:
        if len(input.text) > 1:
            began.set()
            released.wait(10)
        return task.decode(input, *args)

    tasks = {**ANSWERED_TASKS, task.name: replace(task, decode=decode)}
    monkeypatch.setattr("neuronpipe.stages.postprocessor.stage.ANSWERED_TASKS", tasks)
    async with running_postprocessor(read_repository(tmp_path)) as stage:
        long = [asyncio.create_task(stage.postprocess(_item("x" * 100_000))) for _ in range(20)]
        await asyncio.to_thread(began.wait, 10)
        result = await asyncio.wait_for(stage.postprocess(_item(model="other")), 5)
        assert not any(task.done() for task in long)
        released.set()
        await asyncio.gather(*long)
    assert [label.label for label in result.message.text_classification.labels] == ["b"]


async def test_models_are_opened_and_closed_one_by_one(tmp_path: Path) -> None:
    first, second = (read_bundle(write_bundle(tmp_path, name)) for name in ("m", "other"))
    async with running_postprocessor([first]) as stage:
        await stage.models.open(second)
        assert await stage.postprocess(_item(model="other"))
        await stage.models.close(ModelKey("other", 1))
        assert stage.models.keys == {("m", 1)}
        with pytest.raises(ModelNotFound):
            await stage.postprocess(_item(model="other"))


_KINDS = ["byte-level", "unigram", "word-piece", "byte fallback"]
_TEXT = "The keys, and a garden. 😀é tower"


def _with_byte_fallback() -> Tokenizer:
    """Llama 2's kind: a text begins without the space of its first word."""
    pieces = ["<unk>", "▁a", "b", "<0xC3>", "<0xA9>", "<0xF0>"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _tokenizer(kind: str) -> Tokenizer:
    trained = {"byte-level": byte_level_bpe, "unigram": unigram, "word-piece": word_piece}
    return trained[kind](max_tokens=64).backend_tokenizer if kind in trained else _with_byte_fallback()


@pytest.mark.parametrize("kind", _KINDS)
def test_the_bytes_of_tokens_are_those_of_the_running_text(kind: str) -> None:
    tokenizer = _tokenizer(kind)
    detokenizer = load_detokenizer(tokenizer.to_str().encode())
    if kind == "byte fallback":
        token_ids = [1, 2, 3, 4, 1, 1]
        assert detokenizer.text_of(token_ids) == "abé a a"
        assert detokenizer.bytes_of(5, [1]) == b"\xf0"
    else:
        token_ids = tokenizer.encode(_TEXT, add_special_tokens=False).ids
    found, before = b"", list[int]()
    for token_id in token_ids:
        found += detokenizer.bytes_of(token_id, before)
        before = before if detokenizer.is_skipped(token_id) else [token_id]
    assert found.decode() == detokenizer.text_of(token_ids)


@contextmanager
def _writer(kind: str) -> Iterator[tuple[PostprocessorStage, Lanes]]:
    """The stage of a model that generates, and its lanes."""
    with closing(Lanes("postprocess")) as lanes:
        detokenizer = load_detokenizer(_tokenizer(kind).to_str().encode())
        model = DecodingModel(
            model_spec("text_generation", max_tokens=128, vocabulary_size=2000), lanes.lane("small"), detokenizer
        )
        models: Any = SimpleNamespace(table=SimpleNamespace(at=lambda key: nullcontext(model)))
        yield PostprocessorStage(models), lanes


@pytest.mark.parametrize("options", [{}, {"skip_special_tokens": False}, {"stop_strings": ["é", "n. "]}], ids=str)
@pytest.mark.parametrize("kind", _KINDS)
async def test_new_tokens_become_the_same_text_at_once_as_with_a_result(kind: str, options: dict[str, Any]) -> None:
    asked = GenerationOptions(**options)
    input = pack_input(TaskInput(text_generation=TextGenerationInput(prompt="x", options=asked)))
    written = _tokenizer(kind).encode(_TEXT).ids if kind != "byte fallback" else [1, 2, 3, 4, 5, 1]
    with _writer(kind) as (stage, _):
        for begin, end in itertools.combinations(range(len(written) + 1), 2):
            window, token_ids = written[max(0, begin - 8) : begin], written[begin:end]
            outputs = TensorSets(arrays=part_arrays(token_ids, FinishReason.FINISH_REASON_UNSPECIFIED))
            before = TensorSets(arrays=window_arrays(window))
            result = await stage.postprocess(PostprocessItem(Call(), _KEY, input, before, outputs))
            (text,) = result.message.text_generation.sequences
            while (released := stage.detokenize_at_once(DetokenizeItem(_KEY, asked, window, token_ids))) is None:
                await asyncio.sleep(0)  # until the next pass of the event loop
            assert released == (text.text, len(text.token_ids), text.stop_string)


async def test_new_tokens_do_not_become_text_at_once_while_others_do_or_with_log_probabilities() -> None:
    with _writer("byte-level") as (stage, lanes):
        item = DetokenizeItem(_KEY, GenerationOptions(), [5], [6])
        assert stage.detokenize_at_once(item._replace(options=GenerationOptions(top_logprobs=1))) is None
        assert stage.detokenize_at_once(item)
        assert lanes.take_room(4096 - item.size_bytes)
        assert stage.detokenize_at_once(item) is None
