"""Decides which tokens begin a word, as TokenClassificationPipeline does."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from neuronpipe.tasks.base import TokenIds


@dataclass(frozen=True, slots=True)
class WordRule:
    """How a model's tokens show that they continue a word.

    Some tokenizers mark continuations (WordPiece: "##ing"): such a token is longer than its text. With all others
    (byte-level BPE, SentencePiece) a token continues a word unless it begins with a space, or a space is before it. An
    unknown token is a word. Source: transformers 5, pipelines/token_classification.py, gather_pre_entities.
    """

    has_prefix: bool
    unknown_id: int | None

    @classmethod
    def of_model(cls, model: Mapping[str, Any]) -> "WordRule":
        """The rule of tokenizer.json's "model"."""
        unknown_id = model.get("unk_id")
        if unknown_id is None and isinstance(model.get("vocab"), Mapping):
            unknown_id = model["vocab"].get(model.get("unk_token"))
        return cls(bool(model.get("continuing_subword_prefix")), unknown_id)

    def continues_word(
        self, text: str, token_ids: TokenIds, tokens: Sequence[str], starts: TokenIds, ends: TokenIds
    ) -> NDArray[np.bool_]:
        """Whether each token continues a word. `starts` and `ends`: its offsets in the text, in code points."""
        if self.has_prefix:
            lengths = np.fromiter(map(len, tokens), np.int32, len(tokens))
            continues: NDArray[np.bool_] = lengths != ends - starts
        else:
            # A token without characters may be behind the end of the text, where there is no space.
            is_space = np.append(np.frombuffer(text.encode("utf-32-le"), "<u4") == ord(" "), False)
            continues = (starts > 0) & ~is_space[starts] & ~is_space[starts - 1]
        return continues if self.unknown_id is None else continues & (token_ids != self.unknown_id)
