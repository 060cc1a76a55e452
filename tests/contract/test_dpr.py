"""The vectors of DPR's two encoders equal those of transformers, and its reader is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from neuronpipe.api.v1.tasks_pb2 import SentenceEmbeddingInput, TaskInput
from neuronpipe.core.errors import SetupError
from tests.contract.inference import infer_all
from tests.models.compiling import compile_model
from tests.models.repository import SMALL, save
from tests.models.tokenizers import word_piece

_TEXTS = ("a cat", "two dogs and a cat on the mat")


def _source(folder: Path, kind: str, **more: Any) -> Path:
    tokenizer = word_piece(max_tokens=64)
    config = transformers.DPRConfig(vocab_size=len(tokenizer), max_position_embeddings=64, **SMALL, **more)
    return save(getattr(transformers, f"DPR{kind}")(config), folder, tokenizer)


@pytest.mark.parametrize(("kind", "width"), [("QuestionEncoder", 0), ("ContextEncoder", 16)])
async def test_vectors_equal_those_of_transformers(kind: str, width: int, tmp_path: Path) -> None:
    source = _source(tmp_path / "source", kind, projection_dim=width)
    bundle = compile_model(source, tmp_path / "repository")
    assert bundle.spec.task == "sentence_embedding"
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    model = getattr(transformers, f"DPR{kind}").from_pretrained(source).eval()
    asked = [TaskInput(sentence_embedding=SentenceEmbeddingInput(text=text, skip_normalize=True)) for text in _TEXTS]
    for text, result in zip(_TEXTS, await infer_all(bundle.folder, asked), strict=True):
        with torch.inference_mode():
            expected = model(**tokenizer(text, return_tensors="pt")).pooler_output[0].numpy()
        np.testing.assert_allclose(result.sentence_embedding.embedding, expected, rtol=0, atol=5e-5)


@pytest.mark.parametrize(
    ("kind", "task"), [("Reader", "sentence_embedding"), ("QuestionEncoder", "feature_extraction")]
)
def test_what_has_no_vectors_is_refused_by_name(kind: str, task: str, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=f"DPR{kind} gives no vectors of tokens; of DPR, DPRQuestionEncoder and"):
        compile_model(_source(tmp_path / "source", kind), tmp_path / "repository", task)
