"""The text of tokens, by a tokenizer.json. Like stages/tokenizer/text.py it imports the library `tokenizers`."""

import json
import re

from neuronpipe.core.errors import SetupError
from neuronpipe.tasks.generated_text import Detokenizer

# As the decoder ByteFallback finds them (tokenizers 0.23, decoders/byte_fallback.rs).
_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")


def load_detokenizer(written: bytes) -> Detokenizer:
    """The text of tokens. Safe to call from several threads.

    `written`: the file's content. Raises SetupError where the library is not installed: only models that generate
    need it.
    """
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        raise SetupError(
            "the text of generated tokens needs the package tokenizers: pip install 'neuronpipe[postprocessor]'"
        ) from error
    tokenizer = Tokenizer.from_buffer(written)
    # Of a Unigram model, special tokens are pieces that no text contains (compiler/tokenizers.py).
    hidden = {number for piece, number in tokenizer.get_vocab().items() if piece.startswith("\0")}
    special = hidden | {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    is_by_bytes = "ByteFallback" in json.dumps(json.loads(written)["decoder"])
    pieces = tokenizer.get_vocab().items() if is_by_bytes else ()
    return Detokenizer(
        lambda token_ids: str(tokenizer.decode([one for one in token_ids if one not in hidden])),
        lambda token_id: token_id in special or tokenizer.id_to_token(token_id) is None,
        frozenset(number for piece, number in pieces if _BYTE.fullmatch(piece)) - special,
    )
