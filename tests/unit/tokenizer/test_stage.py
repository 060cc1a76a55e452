"""tokenizer/stage.py: inputs to sequences, each item by itself."""

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from demo.model import find_minilm
from neuronpipe.api.v1.inference_pb2 import CacheOutcome
from neuronpipe.api.v1.stages_pb2 import EncodedInput, ItemContext, TokenizeItem
from neuronpipe.api.v1.tasks_pb2 import TaskInput, TextClassificationInput, Truncation
from neuronpipe.bundles.repository import new_bundle, read_repository, write_manifest
from neuronpipe.core.errors import DeadlineExceeded, InvalidInput, ModelNotFound, SetupError
from neuronpipe.core.tensors import to_arrays
from neuronpipe.tokenizer.stage import TokenizerStage
from tests.unit.bundles.written import manifest


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
