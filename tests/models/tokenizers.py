"""Small tokenizers of every kind, trained on the Python manual and a few words of other scripts."""

import io
import json
import pickle
import pydoc_data.topics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, wraps
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
import transformers
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers.models.mbart.tokenization_mbart import FAIRSEQ_LANGUAGE_CODES
from transformers.models.nllb.tokenization_nllb import FAIRSEQ_LANGUAGE_CODES as NLLB_LANGUAGES

from neuronpipe.compiler.accuracy import sentences

_VOCABULARY = 1200
_OTHER_SCRIPTS = (
    "北京是中华人民共和国的首都。東京タワーは建てられた。서울은 대한민국의 수도이다. ירושלים היא בירת ישראל القاهرة هي عاصمة مصر "  # noqa: E501
    "दिल्ली भारत की राजधानी है Zürich Łódź Çeşme Århus Reykjavík café naïve 😀 👍"
)


def _trained_once(make: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, which trains once and returns copies."""
    pickled = cache(lambda **options: pickle.dumps(make(**options)))

    @wraps(make)
    def made(**options: Any) -> Any:
        return pickle.loads(pickled(**options))

    return made


def _fast(tokenizer: Any, max_tokens: int, names: Mapping[str, Any]) -> Any:
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=max_tokens, **names)


def _names_of_pairs(pad: str, unknown: str) -> dict[str, Any]:
    special = {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    return {"pad_token": pad, "unk_token": unknown, "model_input_names": inputs, **special}


@_trained_once
def word_piece(*, max_tokens: int, lowercase: bool = True) -> Any:
    """BERT's kind: [CLS] A [SEP] B [SEP], lower-casing and without accents unless `lowercase` is off."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=_VOCABULARY, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(_corpus(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return _fast(tokenizer, max_tokens, _names_of_pairs("[PAD]", "[UNK]"))


_ROBERTA_TOKENS = ["<s>", "<pad>", "</s>", "<unk>"]
_MASK = AddedToken("<mask>", lstrip=True, special=True)
_ROBERTA_NAMES: dict[str, Any] = {
    "bos_token": "<s>",
    "pad_token": "<pad>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "cls_token": "<s>",
    "sep_token": "</s>",
    "mask_token": _MASK,
    "model_input_names": ["input_ids", "attention_mask"],
}


@_trained_once
def byte_level_bpe(*, max_tokens: int, add_prefix_space: bool = False) -> Any:
    """RoBERTa's kind: <s> A </s></s> B </s>; no text is outside its vocabulary."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=[*_ROBERTA_TOKENS, _MASK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    tokenizer.post_processor = processors.RobertaProcessing(
        ("</s>", 2), ("<s>", 0), trim_offsets=True, add_prefix_space=add_prefix_space
    )
    return _fast(tokenizer, max_tokens, _ROBERTA_NAMES)


@_trained_once
def unigram(*, max_tokens: int) -> Any:
    """XLM-R's kind, SentencePiece: <s> A </s></s> B </s>, with spaces as characters of words."""
    ends = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return _fast(_sentence_piece([*_ROBERTA_TOKENS, _MASK], ends), max_tokens, _ROBERTA_NAMES)


@_trained_once
def t5(*, max_tokens: int) -> Any:
    """T5's kind, SentencePiece: A </s> B </s>, without a token at the start of a text."""
    ends = processors.TemplateProcessing(single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)])
    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    inputs = {"model_input_names": ["input_ids", "attention_mask"]}
    return _fast(_sentence_piece(["<pad>", "</s>", "<unk>"], ends), max_tokens, {**names, **inputs})


def _sentence_piece(special: Sequence[str | AddedToken], ends: Any) -> Any:
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(tokenizers.Regex(" {2,}"), " ")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=_VOCABULARY, special_tokens=[*special], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    tokenizer.post_processor = ends
    return tokenizer


def mbart(*, max_tokens: int) -> Any:
    """mBART's: A </s> en_XX, with the pieces of `unigram`, and its languages behind them."""
    trained = json.loads(unigram(max_tokens=max_tokens).backend_tokenizer.to_str())["model"]["vocab"]
    special = [*_ROBERTA_TOKENS, "<mask>"]
    pieces = [(str(piece), float(score)) for piece, score in trained if piece not in special]
    ends = [[(token, 0.0) for token in tokens] for tokens in (_ROBERTA_TOKENS, [*FAIRSEQ_LANGUAGE_CODES, "<mask>"])]
    vocab = [*ends[0], *pieces, *ends[1]]
    return transformers.MBartTokenizer(vocab=vocab, src_lang="en_XX", model_max_length=max_tokens)


def nllb(*, max_tokens: int) -> Any:
    """NLLB's: eng_Latn A </s>, pieces by merges, and its languages behind them."""
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=_VOCABULARY, special_tokens=_ROBERTA_TOKENS, show_progress=False)
    tokenizer.train_from_iterator(_corpus(), trainer)
    trained = json.loads(tokenizer.to_str())["model"]
    pieces = [*sorted(trained["vocab"], key=trained["vocab"].__getitem__), *NLLB_LANGUAGES, "<mask>"]
    return transformers.NllbTokenizer(
        vocab={piece: number for number, piece in enumerate(pieces)},
        merges=[tuple(merge) for merge in trained["merges"]],
        src_lang="eng_Latn",
        model_max_length=max_tokens,
    )


@_trained_once
def unigram_pairs(*, max_tokens: int) -> Any:
    """ALBERT's and DeBERTa-v3's kind, SentencePiece: [CLS] A [SEP] B [SEP], with a type for each of a pair."""
    ends = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer = _sentence_piece(["<pad>", "[CLS]", "[SEP]", "<unk>", "[MASK]"], ends)
    return _fast(tokenizer, max_tokens, _names_of_pairs("<pad>", "<unk>"))


def unigram_charsmap(*, max_tokens: int) -> Any:
    """XLM-R's kind with SentencePiece's own normalizer (nmt_nfkc), which deletes control characters."""
    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a b c d e f"] * 10), model_writer=trained, vocab_size=10, minloglevel=2
    )
    model = sentencepiece_model_pb2.ModelProto.FromString(trained.getvalue())  # type: ignore[attr-defined]
    tokenizer = unigram(max_tokens=max_tokens)
    tokenizer.backend_tokenizer.normalizer = normalizers.Precompiled(model.normalizer_spec.precompiled_charsmap)
    return tokenizer


def marian(*, max_tokens: int, languages: Sequence[str] = ()) -> Any:
    """Marian's: two SentencePiece models, of the manual and of other languages, that share a vocabulary: A </s>.

    `languages`: those that a text can name before it begins.
    """
    with tempfile.TemporaryDirectory() as written:
        folder, pieces = Path(written), [*_ROBERTA_TOKENS]
        translated = [sentence for of_language in sentences().values() for sentence in of_language]
        for name, lines in (("source.spm", _corpus()), ("target.spm", translated)):
            with (folder / name).open("wb") as file:
                sentencepiece.SentencePieceTrainer.train(
                    sentence_iterator=iter(lines),
                    model_writer=file,
                    vocab_size=_VOCABULARY,
                    minloglevel=2,
                    hard_vocab_limit=False,
                )
            model = sentencepiece.SentencePieceProcessor(model_file=str(folder / name))
            found = range(model.get_piece_size())
            pieces += [model.id_to_piece(piece_id) for piece_id in found if not model.is_control(piece_id)]
        pieces += [f">>{language}<<" for language in languages]
        numbers = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
        (folder / "vocab.json").write_text(json.dumps(numbers))
        return transformers.MarianTokenizer(
            *(str(folder / name) for name in ("source.spm", "target.spm", "vocab.json")), model_max_length=max_tokens
        )


TRAINED: dict[str, Callable[..., Any]] = {
    "word-piece": word_piece,
    "byte-level-bpe": byte_level_bpe,
    "unigram": unigram,
}


def _corpus() -> Iterator[str]:
    for name in sorted(pydoc_data.topics.topics):
        yield from pydoc_data.topics.topics[name].splitlines()[:60]
    yield from [_OTHER_SCRIPTS] * 20
