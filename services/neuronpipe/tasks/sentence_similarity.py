"""Sentence similarity: the cosine similarity of one text with each of many.

Equal to sentence-transformers' `util.cos_sim(model.encode(source), model.encode(texts))`, with encode's `truncate_dim`.
"""

import numpy as np

from neuronpipe.api.v1.tasks_pb2 import SentenceSimilarityInput, SentenceSimilarityResult
from neuronpipe.core.model import ModelSpec
from neuronpipe.core.tensors import ArraySets
from neuronpipe.tasks.base import Encoded, Task, TextTokenizer, check_text, check_truncation, traits_of
from neuronpipe.tasks.many_texts import check_texts, encode_texts, join
from neuronpipe.tasks.vectors import EmbeddingFacts, check_dimensions, normalized, vector_of


def check(input: SentenceSimilarityInput, model: ModelSpec) -> None:
    check_text("source", input.source, may_be_empty=True)
    check_texts("texts", input.texts, may_be_empty=True)
    check_dimensions(input.dimensions, model)
    check_truncation(input)


def encode(input: SentenceSimilarityInput, tokenizer: TextTokenizer, model: ModelSpec) -> Encoded:
    """Returns one sequence of the source, then one sequence of each text, all behind the model's prompt, if any."""
    named = [("source", input.source), *((f"texts[{index}]", text) for index, text in enumerate(input.texts))]
    prompt = EmbeddingFacts.of(model).prompt
    return join(encode_texts(tokenizer, model, named, input.truncation, prompt))


def decode(
    input: SentenceSimilarityInput, model: ModelSpec, annotations: ArraySets, outputs: ArraySets
) -> SentenceSimilarityResult:
    """Returns the cosines from the vector of each sequence.

    Cosines are computed in float64 and rounded to float32, so that the cosine of equal vectors is 1, and none is above.
    """
    vectors = normalized(np.stack([vector_of(output)[: input.dimensions or None] for output in outputs], dtype=float))
    return SentenceSimilarityResult(scores=(vectors[1:] @ vectors[0]).astype(np.float32).tolist())


traits = traits_of("source", "truncation", "texts")
TASK = Task("sentence_similarity", check, traits, encode, decode, ("dimensions",), EmbeddingFacts)
