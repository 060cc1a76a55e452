"""Marian's tokenizer, two SentencePiece models that share a vocabulary, as one tokenizer.json."""

import base64
import json
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import transformers

from neuronpipe.core.errors import SetupError

_UNIGRAM = 1  # ModelProto.TrainerSpec.ModelType
_LEARNED, _CONTROL = {1, 4}, 3  # ModelProto.SentencePiece.Type: NORMAL and USER_DEFINED, CONTROL
# Of pieces that only translations have: no text is divided into them, whatever its other pieces are.
_NEVER = -1e6
# Takes the place of what source.spm has no piece for. Not a character by Unicode, so no vocabulary has it.
_UNKNOWN = "\uffff"


def converted(tokenizer: Any) -> Any:
    """A MarianTokenizer as a PreTrainedTokenizerFast with the same tokens of texts, and texts of tokens.

    Two differences are left, both of text that hardly occurs. Pieces of source.spm that vocab.json lacks are not used,
    where MarianTokenizer makes them unknown. Several characters in a row that source.spm lacks are one unknown token,
    even where vocab.json has them as a piece of translations. Raises SetupError for a tokenizer without such a form.
    """
    folder = Path(tokenizer.spm_files[0]).parent
    if tokenizer.separate_vocabs:
        raise SetupError(f"{folder}: a vocabulary of its own for translations (separate_vocabs) is not supported")
    with tempfile.TemporaryDirectory() as written:
        file = Path(written, "tokenizer.json")
        file.write_text(json.dumps(_content(tokenizer, Path(tokenizer.spm_files[0]))), encoding="utf-8")
        return transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(file),
            model_max_length=tokenizer.model_max_length,
            model_input_names=["input_ids", "attention_mask"],
            source_lang=tokenizer.source_lang,
            **{name: getattr(tokenizer, name) for name in ("unk_token", "eos_token", "pad_token")},
        )


def language_codes(tokenizer: Any) -> list[str]:
    """The languages into which it says a text is to be translated, by a token before the text, as in >>fra<<."""
    return sorted(token[2:-2] for token in tokenizer.get_vocab() if _is_code(token))


def _content(tokenizer: Any, source_spm: Path) -> Mapping[str, Any]:
    from sentencepiece import sentencepiece_model_pb2

    spm = sentencepiece_model_pb2.ModelProto.FromString(source_spm.read_bytes())  # type: ignore[attr-defined]
    if spm.trainer_spec.model_type != _UNIGRAM or spm.trainer_spec.treat_whitespace_as_suffix:
        raise SetupError(f"{source_spm}: is no Unigram model with spaces before words, which Marian's others are")
    numbers: dict[str, int] = tokenizer.encoder
    end = tokenizer.eos_token
    first, second = ({"Sequence": {"id": letter, "type_id": 0}} for letter in "AB")
    last = {"SpecialToken": {"id": end, "type_id": 0}}
    # The pieces that are no text, and the languages before a text.
    special = {tokenizer.unk_token, end, tokenizer.pad_token}
    special |= {piece.piece for piece in spm.pieces if piece.type == _CONTROL}
    sides = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    scores = {piece.piece: piece.score for piece in spm.pieces if piece.type in _LEARNED}
    # In place of numbers that no piece has: NUL is in no text.
    vocabulary = [[f"\0{number}", _NEVER] for number in range(max(numbers.values()) + 1)]
    for piece, number in numbers.items():
        vocabulary[number] = [piece, scores.get(piece, _NEVER)]
    spaces = {
        "type": "Metaspace",
        "replacement": "\u2581",
        "prepend_scheme": "always" if spm.normalizer_spec.add_dummy_prefix else "never",
        "split": True,
    }
    characters = {character for piece in scores for character in piece}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": number, "content": piece, "special": piece in special, **sides}
            for piece, number in sorted(numbers.items(), key=lambda one: one[1])
            if piece in special or _is_code(piece)
        ],
        "normalizer": {"type": "Sequence", "normalizers": _normalizers(spm.normalizer_spec, characters)},
        # One that source.spm does not know is a piece if vocab.json has it, but never a part of a longer one.
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                spaces,
                {
                    "type": "Split",
                    "pattern": {"Regex": _none_of(characters)},
                    "behavior": "Isolated",
                    "invert": False,
                },
            ],
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [first, last],
            "pair": [first, second, last],
            "special_tokens": {end: {"id": end, "ids": [numbers[end]], "tokens": [end]}},
        },
        "decoder": spaces,
        "model": {
            "type": "Unigram",
            "unk_id": numbers[tokenizer.unk_token],
            "vocab": vocabulary,
            "byte_fallback": False,
        },
    }


def _normalizers(spec: Any, characters: Collection[str]) -> list[Mapping[str, Any]]:
    """SentencePiece's own, and several unknown characters as one, which it makes one unknown piece."""
    found: list[Mapping[str, Any]] = []
    if spec.precompiled_charsmap:
        charsmap = base64.b64encode(spec.precompiled_charsmap).decode()
        found.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
    if spec.remove_extra_whitespaces:
        found += [
            {"type": "Strip", "strip_left": True, "strip_right": True},
            {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
        ]
    several = f"{_none_of({*characters, ' '})}{{2,}}"
    return [*found, {"type": "Replace", "pattern": {"Regex": several}, "content": _UNKNOWN}]


def _none_of(characters: Collection[str]) -> str:
    """A pattern of Oniguruma's."""
    known = "".join(rf"\x{{{ord(character):x}}}" for character in sorted(characters))
    return f"[^{known}]"


def _is_code(token: str) -> bool:
    return token.startswith(">>") and token.endswith("<<")
