"""Compiles for sentence embedding: the model and its pooling as one graph."""

from pathlib import Path

import numpy as np
import torch
import transformers

from neuronpipe.compiler.modules import Batch, Named, Outputs, SourceModule, source_module
from neuronpipe.compiler.sentence_transformers import read_sentence_transformer
from neuronpipe.compiler.tasks.base import Measured, SourceTask, encode_texts
from neuronpipe.compiler.tokenizers import SourceTokenizer
from neuronpipe.compiler.weights import load_weights
from neuronpipe.tasks.vectors import EmbeddingFacts, vector_of

_OUTPUT = "sentence_embedding"


class _Embedding(torch.nn.Module):
    """A model and the modules after it, which make one vector of its token vectors."""

    def __init__(self, model: torch.nn.Module, head: torch.nn.Module) -> None:
        super().__init__()
        self.model = Named(model, "last_hidden_state")
        self.head = head

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        token_vectors = self.model(input_ids, attention_mask, token_type_ids)["last_hidden_state"]
        return {_OUTPUT: self.head(token_vectors, attention_mask)}


_TASKS = ("sentence_embedding", "sentence_similarity")


def load_embedder(folder: Path, tokenizer: SourceTokenizer, task: str = "sentence_embedding") -> SourceModule:
    """An embedding model for one of the tasks of its graph. The module also names the other task.

    Raises SetupError.
    """
    parts = read_sentence_transformer(folder)
    model = load_weights(transformers.AutoModel, parts.model_folder)
    module = _Embedding(model, parts.head)
    with torch.inference_mode():
        example = module(torch.zeros((1, 1), dtype=torch.int64), torch.ones((1, 1), dtype=torch.int64))
    shared = EmbeddingFacts(
        embedding_dimensions=example[_OUTPUT].shape[1], prompt=parts.prompt, prompts=dict(parts.prompts)
    )
    facts = dict.fromkeys(_TASKS, shared)
    remarks = {"pooling": parts.head.describe()}
    return source_module(
        module, model, task, tokenizer, outputs=(_OUTPUT,), max_tokens=parts.max_tokens, facts=facts, remarks=remarks
    )


def cosine_similarity(outputs: Outputs, reference: Outputs, batch: Batch) -> Measured:
    """The cosine similarity of each row's vectors, 0 to 1."""
    one, other = (vector_of(vectors).astype(np.float64) for vectors in (outputs, reference))
    lengths = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    cosines: Measured = (one * other).sum(axis=1) / np.maximum(lengths, np.finfo(np.float64).tiny)
    return np.clip(cosines, 0, 1)  # rounding may exceed 1, and below 0 is as wrong as 0


TASK = SourceTask(
    load_embedder, encode_texts, cosine_similarity, np.min, "smallest cosine similarity of a text's embeddings"
)
