"""The head of a masked language model gives for one chosen token what it gives for all of them,
in every architecture; and texts with masks are filled as the pipeline fills them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers

from neuronpipe.api.v1.tasks_pb2 import FilledMask
from neuronpipe.compiler.tasks import load_module
from neuronpipe.compiler.tokenizers import load_tokenizer
from neuronpipe.core.errors import SetupError
from neuronpipe.doors.http.huggingface_tasks import fill_mask
from neuronpipe.stages.tokenizer.text import JsonTokenizer
from tests.models.repository import SMALL, save
from tests.models.tokenizers import byte_level_bpe, unigram, word_piece

_SIZES = {"vocab_size": 1200, **SMALL}
_BERT = {**_SIZES, "max_position_embeddings": 64}
_ROBERTA = {**_SIZES, "max_position_embeddings": 66, "type_vocab_size": 1, "pad_token_id": 1}
_DISTIL = {"vocab_size": 1200, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "max_position_embeddings": 64}
_DEBERTA = {
    **_BERT,
    "pad_token_id": 1,
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_buckets": 16,
}
_MOBILE = {**_BERT, "embedding_size": 16, "intra_bottleneck_size": 16, "num_feedforward_networks": 1}
_MODERN = {
    **_BERT,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "cls_token_id": 0,
    "sep_token_id": 2,
    "local_attention": 16,
}

# architecture → (its tokenizer, its configuration)
_ARCHITECTURES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "Bert": (word_piece, _BERT),
    "Roberta": (byte_level_bpe, _ROBERTA),
    "XLMRoberta": (unigram, _ROBERTA),
    "DistilBert": (word_piece, _DISTIL),
    "Albert": (unigram, {**_BERT, "embedding_size": 16, "pad_token_id": 1}),
    "Electra": (word_piece, {**_BERT, "embedding_size": 16}),
    "MPNet": (word_piece, _ROBERTA),
    "DebertaV2": (unigram, _DEBERTA),
    "MobileBert": (word_piece, _MOBILE),
    "ModernBert": (byte_level_bpe, _MODERN),
}


def _source(folder: Path, architecture: str) -> Path:
    make_tokenizer, config = _ARCHITECTURES[architecture]
    model = getattr(transformers, f"{architecture}ForMaskedLM")(
        getattr(transformers, f"{architecture}Config")(**config)
    )
    return save(model, folder, make_tokenizer(max_tokens=64))


@pytest.mark.parametrize("architecture", _ARCHITECTURES)
def test_logits_of_one_token_equal_those_among_all(architecture: str, tmp_path: Path) -> None:
    source = _source(tmp_path, architecture)
    module = load_module(source, "fill_mask", load_tokenizer(source))
    reference = transformers.AutoModelForMaskedLM.from_pretrained(source).eval()
    generator = np.random.default_rng(20261122)
    rows, tokens = np.arange(3), np.array([40, 7, 23])
    chosen = np.array([12, 6, 0])
    batch = {
        "input_ids": torch.from_numpy(
            np.where(np.arange(40) < tokens[:, np.newaxis], generator.integers(5, 1200, (3, 40)), 1)
        ),
        "attention_mask": torch.from_numpy((np.arange(40) < tokens[:, np.newaxis]).astype(np.int64)),
    }
    position = torch.zeros((3, 40), dtype=torch.int64)
    position[rows, chosen] = 1

    with torch.inference_mode():
        logits = module.module(**batch, mask_position=position)["logits"]
        expected = reference(**batch).logits[rows, chosen]

    assert logits.shape == (3, 1200)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


def test_a_model_without_a_mask_has_nothing_to_fill(tmp_path: Path) -> None:
    source = _source(tmp_path, "Bert")
    tokenizer = load_tokenizer(source)
    tokenizer.transformers_tokenizer.mask_token = None
    with pytest.raises(SetupError, match="its tokenizer has no mask token"):
        load_module(source, "fill_mask", tokenizer)


@pytest.mark.parametrize(
    ("task", "head"), [("fill_mask", "ForTokenClassification"), ("token_classification", "ForMaskedLM")]
)
def test_a_model_without_a_head_for_the_task_is_refused(task: str, head: str, tmp_path: Path) -> None:
    config = transformers.BertConfig(**_BERT)
    source = save(getattr(transformers, f"Bert{head}")(config), tmp_path, word_piece(max_tokens=64))
    with pytest.raises(SetupError, match="the model was not trained for this task"):
        load_module(source, task, load_tokenizer(source))


@pytest.mark.parametrize(
    ("make", "has_space", "begin"), [(word_piece, False, ""), (byte_level_bpe, True, "Ġ"), (unigram, True, "▁")]
)
def test_a_token_is_put_into_a_text_as_the_pipeline_puts_it(make: Any, has_space: bool, begin: str) -> None:
    """`has_space`: whether the mask has the space before it, as that of RoBERTa and XLM-R. The pipeline decodes the
    tokens of the whole text; words, and tokens that continue one in BERT's way, are the same in both.
    """
    tokenizer = make(max_tokens=64)
    if has_space:
        mask = tokenizers.AddedToken("<mask>", lstrip=True, special=True)
        tokenizer.add_special_tokens({"mask_token": mask})
    written = json.loads(tokenizer.backend_tokenizer.to_str())
    for token in written["added_tokens"]:  # as compiled: a mask that a caller writes is one
        token["special"] &= token["content"] != tokenizer.mask_token
    text = f"the cat {tokenizer.mask_token} on the mat"
    located = JsonTokenizer(json.dumps(written).encode()).locate(text)
    at = located.token_ids.tolist().index(tokenizer.mask_token_id)
    place = FilledMask(start=int(located.char_start[at]), end=int(located.char_end[at]))
    ids, found = tokenizer(text)["input_ids"], 0
    for name, token_id in tokenizer.get_vocab().items():
        is_word = name.startswith(begin) and name.removeprefix(begin).isalnum()
        if token_id in tokenizer.all_special_ids or not (is_word or name.startswith("##")):
            continue
        expected = tokenizer.decode([*ids[:at], token_id, *ids[at + 1 :]], skip_special_tokens=True)
        assert fill_mask(text, place, tokenizer.decode([token_id])) == expected, name
        found += 1
    assert found > 100
