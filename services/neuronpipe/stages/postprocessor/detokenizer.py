"""Makes a model's detokenizer from its tokenizer.json."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from neuronpipe.core.errors import SetupError
from neuronpipe.tasks.generated_text import Detokenizer

# Byte tokens as the decoder ByteFallback finds them (tokenizers 0.23, decoders/byte_fallback.rs).
_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")
# The characters of byte-level tokens (GPT-2's bytes_to_unicode). Bytes without a visible character have substitutes.
_VISIBLE = (*range(33, 127), *range(161, 173), *range(174, 256))
_HIDDEN = [byte for byte in range(256) if byte not in _VISIBLE]
_BYTE_OF = {chr(byte): byte for byte in _VISIBLE} | {chr(256 + place): byte for place, byte in enumerate(_HIDDEN)}
# The decoders of Llama 2 and Gemma, which differ in Strip. It takes the space from the first token of a text.
_SPACE = "\u2581"
_WITH_FALLBACK = [
    {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
_STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


class _PlainTokens(dict[int, bytes | None]):
    """The bytes of plain tokens, each found when it is first needed; None for other tokens."""

    def __init__(self, find: Callable[[int], bytes | None]) -> None:
        super().__init__()
        self._find = find

    def __missing__(self, token_id: int) -> bytes | None:
        found = self[token_id] = self._find(token_id)
        return found


def load_detokenizer(written: bytes) -> Detokenizer:
    """Makes the object that turns tokens into text. Several threads may call it.

    `written`: the file's content. Raises SetupError if the library is not installed, which only generating models
    need.
    """
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        raise SetupError(
            "the text of generated tokens needs the package tokenizers: pip install 'neuronpipe[postprocessor]'"
        ) from error
    tokenizer = Tokenizer.from_buffer(written)
    # In a Unigram model, special tokens are pieces that no text contains (compiler/tokenizers.py).
    hidden = {number for piece, number in tokenizer.get_vocab().items() if piece.startswith("\0")}
    special = hidden | {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    decoder = json.loads(written)["decoder"]
    kinds = json.dumps(decoder)
    pieces = tokenizer.get_vocab().items() if "ByteFallback" in kinds else ()
    added = tokenizer.get_added_tokens_decoder()
    plain_piece = _plain_piece(decoder)

    def bytes_of(token_id: int) -> bytes | None:
        piece = str(tokenizer.id_to_token(token_id))
        if token_id in added:
            return str(added[token_id].content).removeprefix("\0").encode()
        if "ByteLevel" in kinds:
            return bytes(_BYTE_OF[character] for character in piece if character in _BYTE_OF)
        return bytes([int(piece[1:-1], 16)]) if "ByteFallback" in kinds and _BYTE.fullmatch(piece) else None

    def plain_bytes(token_id: int) -> bytes | None:
        piece = tokenizer.id_to_token(token_id)
        return None if piece is None or token_id in added or token_id in hidden else plain_piece(piece)

    byte_ids = frozenset(number for piece, number in pieces if _BYTE.fullmatch(piece)) - special
    marks = [str(tokenizer.id_to_token(number)) for number in hidden]

    def whole_text(token_ids: Sequence[int]) -> str:
        text = str(tokenizer.decode(list(token_ids), skip_special_tokens=False))
        for mark in marks if "\0" in text else ():
            text = text.replace(mark, mark[1:])
        return text

    plain = _PlainTokens(plain_bytes).__getitem__
    with_special = Detokenizer(
        whole_text, lambda token_id: tokenizer.id_to_token(token_id) is None, byte_ids, bytes_of, plain
    )
    return Detokenizer(
        text_of=lambda token_ids: str(tokenizer.decode([token_id for token_id in token_ids if token_id not in hidden])),
        is_skipped=lambda token_id: token_id in special or tokenizer.id_to_token(token_id) is None,
        byte_ids=byte_ids,
        own_bytes=bytes_of,
        plain_bytes=plain,
        with_special=with_special,
    )


def _plain_piece(decoder: Mapping[str, Any] | None) -> Callable[[str], bytes | None]:
    """Returns a function that gives a piece's bytes if they do not depend on its neighbours, else None. It knows the
    decoders of most generating models.
    """
    steps = (decoder or {}).get("decoders", [decoder])
    if [step and step["type"] for step in steps] == ["ByteLevel"]:
        return _byte_level
    return _spaced if steps in (_WITH_FALLBACK, [*_WITH_FALLBACK, _STRIP]) else lambda _: None


def _byte_level(piece: str) -> bytes | None:
    try:
        return bytes([_BYTE_OF[character] for character in piece])
    except KeyError:
        return None


def _spaced(piece: str) -> bytes | None:
    return None if _BYTE.fullmatch(piece) else piece.replace(_SPACE, " ").encode()
