"""Marian's tokenizer as a tokenizer.json: the tokens and texts of transformers' MarianTokenizer."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import transformers

from neuronpipe.compiler.accuracy import sentences
from neuronpipe.compiler.tokenizers import load_tokenizer
from neuronpipe.core.errors import SetupError
from tests.models.tokenizers import marian
from tests.oracle.texts import PICKED, generated

_OTHERS = [sentence for of_language in sentences().values() for sentence in of_language]
# Of the other languages' characters the source has no pieces for many; the vocabulary has them for translations.
_STRANGE = [*"äöüß\t\n…“„ﬁ½①Å👍\u200b\ufeff\u00a0\u3000\uffff", *"".join(_OTHERS)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("marian")
    marian(max_tokens=128, languages=("deu_Latn", "fra")).save_pretrained(folder)
    assert not (folder / "tokenizer.json").exists()
    return folder


@pytest.fixture(scope="module")
def own(source: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(source)


def _texts() -> list[str]:
    chosen = random.Random(61)
    texts = ["  two  spaces ", " ", "a", "x\ty\nz", "e\u0301a\u0308", ">>fra<< Hello", ">>deu_Latn<<  Hello there"]
    for text in [*PICKED, *generated(62, 400, words=(1, 30))]:
        characters = list(text)
        for _ in range(chosen.randint(0, 5)):
            characters.insert(chosen.randint(0, len(characters)), chosen.choice(_STRANGE))
        texts += [text, "".join(characters)]
    return texts


def _as_pieces(own: Any, text: str, token_ids: list[int]) -> list[str]:
    """The tokens, but with equal scores in any order: the pieces of a rule of "=" and "-" are the same ones."""
    pieces = own.convert_ids_to_tokens(token_ids)
    return sorted(pieces) if "====" in text or "----" in text else pieces


def test_texts_have_the_tokens_that_marian_gives_them(source: Path, own: Any) -> None:
    converted = load_tokenizer(source).transformers_tokenizer
    for text in _texts():
        ours, theirs = converted(text)["input_ids"], own(text)["input_ids"]
        assert _as_pieces(own, text, ours) == _as_pieces(own, text, theirs), text


def test_several_unknown_characters_are_one_token(source: Path, own: Any) -> None:
    converted = load_tokenizer(source).transformers_tokenizer
    words = {word for text in _OTHERS for word in text.split() if not word.isascii()}
    unknown = [word for word in words if own.convert_ids_to_tokens(own(word)["input_ids"])[1:-1] == ["<unk>"]]
    assert len(unknown) > 50
    assert [converted(word)["input_ids"] for word in unknown] == [own(word)["input_ids"] for word in unknown]


def test_tokens_have_the_text_that_marian_gives_them(source: Path, own: Any) -> None:
    converted, chosen = load_tokenizer(source).transformers_tokenizer, random.Random(63)
    for _ in range(2000):
        token_ids = [chosen.randrange(len(own)) for _ in range(chosen.randint(1, 12))]
        said = own.decode(token_ids, skip_special_tokens=True)
        assert converted.decode(token_ids, skip_special_tokens=True).strip() == said


def test_its_limit_and_special_tokens_are_kept(source: Path, own: Any) -> None:
    found = load_tokenizer(source)
    assert (found.max_tokens, found.pad_token_id) == (128, own.pad_token_id)
    assert found.transformers_tokenizer.eos_token_id == own.eos_token_id


def test_a_vocabulary_of_its_own_for_translations_is_refused(source: Path, tmp_path: Path) -> None:
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "target_vocab.json").write_bytes((source / "vocab.json").read_bytes())
    settings = json.loads((source / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"separate_vocabs": True}))
    with pytest.raises(SetupError, match="separate_vocabs"):
        load_tokenizer(tmp_path)


def test_pieces_by_merges_are_refused(source: Path, tmp_path: Path) -> None:
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with (tmp_path / "source.spm").open("wb") as written:
        options: Any = {"vocab_size": 12, "model_type": "bpe", "minloglevel": 2}
        text = iter(["a b c d e f"] * 10)
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=text, model_writer=written, **options)
    with pytest.raises(SetupError, match=r"source\.spm: is no Unigram model"):
        load_tokenizer(tmp_path)
