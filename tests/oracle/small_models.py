"""Small models of three families, each with a tokenizer of its own kind."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers

from tests.models.repository import SMALL, save
from tests.models.tokenizers import byte_level_bpe, unigram, word_piece

# family → (its tokenizer, its configuration's class, the positions before its first token)
_FAMILIES: dict[str, tuple[Callable[..., Any], str, int]] = {
    "Bert": (word_piece, "BertConfig", 0),
    "Roberta": (byte_level_bpe, "RobertaConfig", 2),
    "XLMRoberta": (unigram, "XLMRobertaConfig", 2),
}
FAMILIES = tuple(_FAMILIES)


def make_source(folder: Path, family: str, head: str, *, max_tokens: int, **config: Any) -> Path:
    """A model of a family, such as "Bert", with a head, such as "ForTokenClassification", that takes so many tokens."""
    make_tokenizer, config_name, offset = _FAMILIES[family]
    tokenizer = make_tokenizer(max_tokens=max_tokens)
    config = getattr(transformers, config_name)(
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        max_position_embeddings=max_tokens + offset,
        type_vocab_size=1 if offset else 2,
        **SMALL,
        **config,
    )
    return save(getattr(transformers, f"{family}{head}")(config), folder, tokenizer)
