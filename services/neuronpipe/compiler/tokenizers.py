"""Reads a model's tokenizer as tokenizer.json, also for models with the files of a slow tokenizer.

Marian's tokenizers are two SentencePiece models that share a vocabulary. They become one tokenizer.json.
"""

import base64
import json
import tempfile
import warnings
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import transformers

from neuronpipe.compiler.saved_files import read_object, reason_of, refusing
from neuronpipe.compiler.sentence_transformers import read_limits, transformer_folder
from neuronpipe.core.errors import SetupError

_UNIGRAM = 1  # ModelProto.TrainerSpec.ModelType
_LEARNED, _CONTROL = {1, 4}, 3  # ModelProto.SentencePiece.Type: NORMAL and USER_DEFINED, CONTROL
# The score of pieces that only translations have: no text is divided into them, for all other pieces it may have.
_NEVER = -1e6
_UNREADABLE = "\ufffd"
# Replaces characters for which source.spm has no piece. Unicode has no such character, so no vocabulary contains it.
_UNKNOWN = "\uffff"


def converted_marian(tokenizer: Any) -> Any:
    """Converts a MarianTokenizer to a PreTrainedTokenizerFast that encodes and decodes texts in the same way.

    Two differences remain, both for text that hardly occurs. Pieces of source.spm that vocab.json lacks are not used,
    but MarianTokenizer makes unknown tokens of them. Several characters in a row that source.spm lacks are one unknown
    token, even if vocab.json contains them as a piece of translations. Raises SetupError for a tokenizer without such a
    form.
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
    """Returns the target languages that a token before the text can choose, such as >>fra<<."""
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
    # The pieces that are not text, and the languages before a text.
    special = {tokenizer.unk_token, end, tokenizer.pad_token}
    special |= {piece.piece for piece in spm.pieces if piece.type == _CONTROL}
    sides = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    scores = {piece.piece: piece.score for piece in spm.pieces if piece.type in _LEARNED}
    # Fills the numbers that no piece has: no text contains NUL.
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
            for piece, number in sorted(numbers.items(), key=lambda piece_and_number: piece_and_number[1])
            if piece in special or _is_code(piece)
        ],
        "normalizer": {"type": "Sequence", "normalizers": _normalizers(spm.normalizer_spec, characters)},
        # A character that source.spm lacks is a piece if vocab.json contains it, but never a part of a longer piece.
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                spaces,
                {"type": "Split", "pattern": {"Regex": _none_of(characters)}, "behavior": "Isolated", "invert": False},
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
    """Returns SentencePiece's normalizers, and a normalizer that makes one unknown character of several in a row."""
    normalizers: list[Mapping[str, Any]] = []
    if spec.precompiled_charsmap:
        charsmap = base64.b64encode(spec.precompiled_charsmap).decode()
        normalizers.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
    if spec.remove_extra_whitespaces:
        normalizers += [
            {"type": "Strip", "strip_left": True, "strip_right": True},
            {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
        ]
    several = f"{_none_of({*characters, ' '})}{{2,}}"
    return [*normalizers, {"type": "Replace", "pattern": {"Regex": several}, "content": _UNKNOWN}]


def _none_of(characters: Collection[str]) -> str:
    """Writes an Oniguruma pattern that matches any other character."""
    alternatives = "".join(rf"\x{{{ord(character):x}}}" for character in sorted(characters))
    return f"[^{alternatives}]"


def _is_code(token: str) -> bool:
    return token.startswith(">>") and token.endswith("<<")


# transformers writes 1e30 if a tokenizer has no limit.
_NO_LIMIT = 1_000_000
_WORD_PIECE_PREFIX = "##"
# Characters that a small vocabulary lacks.
_RARE = "\u2603\U00013000\ua66e \u4e00"


@dataclass(frozen=True, slots=True)
class SourceTokenizer:
    """The tokenizer of transformers, and its tokenizer.json. `max_tokens`: None if the tokenizer sets no limit."""

    transformers_tokenizer: Any
    json: str
    input_names: tuple[str, ...]
    max_tokens: int | None
    pad_token_id: int
    cls_token_id: int | None


# The tokenizer of a model without texts.
NO_TOKENIZER = SourceTokenizer(
    transformers_tokenizer=None, json="", input_names=(), max_tokens=None, pad_token_id=0, cls_token_id=None
)


def load_tokenizer(folder: Path, *, of_prompts: bool = False) -> SourceTokenizer:
    """Reads the tokenizer as tokenizer.json. `of_prompts`: ignores add_bos_token and add_eos_token, so prompts get only
    the tokens that tokenizer.json adds at the ends. Raises SetupError.
    """
    folder = transformer_folder(folder)
    problem = f"{folder}: transformers {transformers.__version__} cannot load its tokenizer"
    with refusing(problem, why=partial(_why_not_loaded, folder)), warnings.catch_warnings():
        # MarianTokenizer recommends sacremoses, and does not use it.
        warnings.filterwarnings("ignore", ".*sacremoses", UserWarning)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, use_fast=True, trust_remote_code=False)
    if isinstance(tokenizer, transformers.MarianTokenizer):
        tokenizer = converted_marian(tokenizer)
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise SetupError(
            f"{folder}: {type(tokenizer).__name__} is written in Python only and has no form as tokenizer.json; "
            "compile a model with a WordPiece, BPE or Unigram tokenizer"
        )
    # From a folder without tokenizer files, transformers 5 makes a tokenizer with special tokens only.
    learned = set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens)
    if not any(character.isalnum() for token in learned for character in token):
        raise SetupError(f"{folder}: its tokenizer has no vocabulary: the files of the tokenizer are missing")
    if read_limits(folder).get("do_lower_case"):
        _lower_case(tokenizer)
    if not of_prompts:
        _add_ends(folder, tokenizer)
    backend = tokenizer.backend_tokenizer
    advice = "; name a token of its vocabulary as unk_token in tokenizer.json (model), or null"
    with refusing(f"{folder}: its tokenizer cannot read every text", advice=advice):
        backend.encode(_RARE)
    content: dict[str, Any] = json.loads(backend.to_str())
    _check_prefix(folder, content["model"])
    # The file may contain a maximum length. Only the tokenizer stage sets limits.
    content["truncation"] = content["padding"] = None
    limit = tokenizer.model_max_length
    if tokenizer.pad_token_id is None:  # many decoders lack a padding token; any token would do, as it is masked
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    return SourceTokenizer(
        transformers_tokenizer=tokenizer,
        json=json.dumps(content, ensure_ascii=False),
        input_names=tuple(tokenizer.model_input_names),
        max_tokens=int(limit) if limit and limit < _NO_LIMIT else None,
        pad_token_id=tokenizer.pad_token_id,
        cls_token_id=tokenizer.cls_token_id,
    )


def _check_prefix(folder: Path, model: Mapping[str, Any]) -> None:
    """Raises SetupError if a WordPiece model has a wrong prefix of pieces: all words would be unknown to it."""
    prefix = model.get("continuing_subword_prefix")
    if model["type"] == "WordPiece" and prefix != _WORD_PIECE_PREFIX:
        usual = sum(piece.startswith(_WORD_PIECE_PREFIX) for piece in model["vocab"])
        prefixed = sum(bool(prefix) and piece.startswith(prefix) for piece in model["vocab"])
        if usual > max(prefixed, len(model["vocab"]) // 100):
            raise SetupError(
                f"{folder}: tokenizer.json has the continuing_subword_prefix {prefix!r:.20}, and {usual} tokens of its "
                f"vocabulary begin with {_WORD_PIECE_PREFIX}; correct it"
            )


def _lower_case(tokenizer: Any) -> None:
    """Makes the tokenizer lower texts first, as in sentence-transformers, unless the tokenizer already does."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    normalizer = content["normalizer"] or {}
    parts = normalizer.get("normalizers", [normalizer] if normalizer else [])
    if all(part["type"] != "Lowercase" for part in parts):
        content["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "Lowercase"}, *parts]}
        tokenizer._tokenizer = type(tokenizer.backend_tokenizer).from_str(json.dumps(content))


def _add_ends(folder: Path, tokenizer: Any) -> None:
    """Adds the tokens of add_bos_token and add_eos_token around texts if tokenizer.json lacks them.

    transformers 5 ignores these fields if there is a tokenizer.json, and transformers 4 reads them for few classes. The
    model's author used a class or code that reads them. Raises SetupError for a tokenizer that adds other tokens there.
    """
    settings, backend = _settings(folder), tokenizer.backend_tokenizer
    plain, whole = (backend.encode("a", add_special_tokens=adds_special).ids for adds_special in (False, True))
    start = next((start for start in range(len(whole)) if whole[start : start + len(plain)] == plain), 0)
    ends = {"bos": whole[:start], "eos": whole[start + len(plain) :]}
    added = {name: getattr(tokenizer, f"{name}_token_id") for name in ends if settings.get(f"add_{name}_token") is True}
    missing = {name: token for name, token in added.items() if token not in (None, *ends[name])}
    if not missing:
        return
    if others := [name for name in missing if ends[name]]:
        raise SetupError(
            f"{folder}: tokenizer_config.json has add_{others[0]}_token, and its tokenizer.json adds another token "
            "there; correct one of the two"
        )
    ends |= {name: [token] for name, token in missing.items()}
    template = [
        [*(_piece(backend, token, kind) for token in ends["bos"]), {"Sequence": {"id": letter, "type_id": kind}}]
        + [_piece(backend, token, kind) for token in ends["eos"]]
        for kind, letter in enumerate("AB")
    ]
    tokens = {backend.id_to_token(token_id): token_id for token_id in (*ends["bos"], *ends["eos"])}
    content = json.loads(backend.to_str())
    before = content["post_processor"] or {}
    content["post_processor"] = {
        "type": "Sequence",
        "processors": [
            # This processor says where tokens begin.
            *(processor for processor in before.get("processors", [before]) if processor.get("type") == "ByteLevel"),
            {
                "type": "TemplateProcessing",
                "single": template[0],
                "pair": [*template[0], *template[1]],
                "special_tokens": {
                    name: {"id": name, "ids": [token_id], "tokens": [name]} for name, token_id in tokens.items()
                },
            },
        ],
    }
    tokenizer._tokenizer = type(backend).from_str(json.dumps(content))


def _piece(backend: Any, token: int, kind: int) -> Mapping[str, Any]:
    return {"SpecialToken": {"id": backend.id_to_token(token), "type_id": kind}}


def _settings(folder: Path) -> Mapping[str, Any]:
    return read_object(folder / "tokenizer_config.json", may_lack=True)


def _own_code(settings: Mapping[str, Any]) -> Sequence[str | None]:
    classes = settings.get("auto_map") or {}
    return (classes.get("AutoTokenizer") or []) if isinstance(classes, dict) else classes


def _why_not_loaded(folder: Path, error: Exception) -> str:
    if _own_code(_settings(folder)):
        return (
            "it has code of its own (auto_map in tokenizer_config.json), which is not run; get a model whose tokenizer "
            "transformers has"
        )
    if isinstance(error, UnicodeDecodeError):
        for path in sorted(path for kind in ("json", "jinja", "txt") for path in folder.glob(f"*.{kind}")):
            with suppress(UnicodeDecodeError):
                path.read_text(encoding="utf-8")
                continue
            return f"{path.name} is no text in UTF-8; get the file again"
    return reason_of(error)


def serving_json(tokenizer: SourceTokenizer, mask_token: str) -> str:
    """Writes the tokenizer.json to serve: special tokens in texts are text, except the mask of a fill-mask model.

    The tokenizer stage leaves special tokens in texts alone. The mask is found because it is not special in this file.
    SentencePiece's Unigram model also has the special tokens among its pieces, with the best score of all, and would
    find "</s>" in a text. So these pieces get a prefix with NUL, which no text contains. (Google's SentencePiece never
    finds its control symbols in texts; transformers does, even with split_special_tokens.)
    """
    content = json.loads(tokenizer.json)
    allowed = {mask_token} if mask_token else set()
    special = {token["content"] for token in content["added_tokens"] if token["special"]} - allowed
    if content["model"].get("type") == "Unigram":
        pieces = content["model"]["vocab"]
        hidden = special & {piece for piece, _ in pieces}
        content["model"]["vocab"] = [["\0" + piece if piece in hidden else piece, score] for piece, score in pieces]
        for token in content["added_tokens"]:
            token["content"] = "\0" * (token["content"] in hidden) + token["content"]
    for token in content["added_tokens"]:
        token["special"] = token["special"] and token["content"] not in allowed
    return json.dumps(content, ensure_ascii=False)


def token_texts(tokenizer: SourceTokenizer, count: int, *, are_unique: bool = False) -> list[str]:
    """Returns the first `count` tokens as text. `are_unique`: spells a part of a character as in the vocabulary."""
    transformers_tokenizer = tokenizer.transformers_tokenizer
    texts: list[str] = transformers_tokenizer.batch_decode([[token_id] for token_id in range(count)])
    if are_unique:
        parts = [token_id for token_id, text in enumerate(texts) if _UNREADABLE in text]
        for token_id, spelled in zip(parts, transformers_tokenizer.convert_ids_to_tokens(parts), strict=True):
            texts[token_id] = str(spelled)
    return texts


def encode_batch(
    tokenizer: SourceTokenizer, texts: Sequence[str], max_tokens: int, questions: Sequence[str] | None = None
) -> Mapping[str, Any]:
    """Encodes the texts, or questions with the texts as contexts, as a padded batch, int64 [batch, tokens]."""
    pairs = (list(texts),) if questions is None else (list(questions), list(texts))
    return tokenizer.transformers_tokenizer(
        *pairs,
        padding="longest",
        truncation=True,
        max_length=max_tokens,
        return_tensors="np",
        return_attention_mask=True,
        padding_side="right",
    )
