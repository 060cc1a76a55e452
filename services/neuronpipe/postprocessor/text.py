"""The text of tokens, by a tokenizer.json. Like tokenizer/text.py it imports the library `tokenizers`."""

from neuronpipe.core.errors import SetupError
from neuronpipe.tasks.generated_text import TextOf


def load_text_of(written: bytes) -> TextOf:
    """The function from tokens to their text, without special tokens. Safe to call from several threads.

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
    # Of a Unigram model, special tokens are pieces that no text contains (bundles/compiler/tokenizers.py).
    hidden = {number for piece, number in tokenizer.get_vocab().items() if piece.startswith("\0")}
    return lambda token_ids: str(tokenizer.decode([one for one in token_ids if one not in hidden]))
