"""Compiles for question answering: the logits of an answer's start and end."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import transformers

from neuronpipe.compiler.modules import Batch, Named, Outputs, SourceModule, source_module
from neuronpipe.compiler.tasks.base import Measured, SourceTask, encode_texts
from neuronpipe.compiler.tokenizers import SourceTokenizer
from neuronpipe.compiler.weights import load_weights
from neuronpipe.core.errors import SetupError
from neuronpipe.tasks.question_answering import QuestionAnsweringFacts

_OUTPUTS = ("start_logits", "end_logits")

# The first words of a text are its question. Like a real question, it is short, and has words of its context.
_QUESTION_WORDS = 8


def _load(folder: Path, tokenizer: SourceTokenizer) -> SourceModule:
    if tokenizer.transformers_tokenizer.padding_side != "right":
        raise SetupError(
            f"{folder}: pads on the left, so it reads the context before the question, which is not supported"
        )
    model = load_weights(transformers.AutoModelForQuestionAnswering, folder)
    facts = {"question_answering": QuestionAnsweringFacts(cls_token_id=tokenizer.cls_token_id)}
    return source_module(
        Named(model, *_OUTPUTS), model, "question_answering", tokenizer, outputs=_OUTPUTS, per_token=True, facts=facts
    )


def _encode(module: SourceModule, texts: Sequence[str]) -> Batch:
    return encode_texts(module, texts, [" ".join(text.split()[:_QUESTION_WORDS]) for text in texts])


def _same_best_answer(outputs: Outputs, reference: Outputs, batch: Batch) -> Measured:
    is_token = batch["attention_mask"] == 1
    same: Measured = np.ones(len(is_token), np.bool_)
    for name in _OUTPUTS:
        best, expected = (np.where(is_token, logits[name], -np.inf).argmax(axis=1) for logits in (outputs, reference))
        same = same & (best == expected)
    return same


TASK = SourceTask(_load, _encode, _same_best_answer, np.mean, "share of texts with the same best start and end")
