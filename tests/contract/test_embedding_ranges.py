"""Vectors of int8: their ranges are those of the texts of the comparison, and the results those of
sentence-transformers with the same ranges.
"""

from pathlib import Path

import numpy as np
from sentence_transformers.util.quantization import quantize_embeddings

from neuronpipe.api.v1.tasks_pb2 import EmbeddingPrecision, SentenceEmbeddingInput, TaskInput
from neuronpipe.tasks.vectors import EmbeddingFacts
from tests.contract.inference import infer_all
from tests.models.architectures import make_source
from tests.models.compiling import compile_model


async def test_vectors_are_quantized_by_the_ranges_of_the_users_texts(tmp_path: Path) -> None:
    source = make_source(tmp_path / "source", "BERT", "sentence_embedding")
    texts = [f"The train number {number} leaves at {number % 24}." for number in range(160)]
    file = tmp_path / "texts.txt"
    file.write_text("\n".join(texts))
    bundle = compile_model(source, tmp_path / "repository", "sentence_embedding", name="model", calibration=file)
    facts = EmbeddingFacts.of(bundle.spec)
    inputs = [
        TaskInput(sentence_embedding=SentenceEmbeddingInput(text=text, precision=precision))
        for precision in (EmbeddingPrecision.EMBEDDING_PRECISION_FLOAT32, EmbeddingPrecision.EMBEDDING_PRECISION_INT8)
        for text in texts
    ]
    results = [result.sentence_embedding for result in await infer_all(bundle.folder, inputs)]
    floats = np.array([result.embedding for result in results[: len(texts)]], np.float32)
    ours = np.stack([np.frombuffer(result.packed, np.int8) for result in results[len(texts) :]])
    # Every second text is compared, and gives the ranges.
    np.testing.assert_allclose(facts.lowest, floats[1::2].min(axis=0), rtol=0, atol=1e-5)
    np.testing.assert_allclose(facts.highest, floats[1::2].max(axis=0), rtol=0, atol=1e-5)
    expected = quantize_embeddings(floats, precision="int8", ranges=np.array([facts.lowest, facts.highest]))
    # A batch of another size may round a number at a step's border to the other side.
    difference = np.abs(ours.astype(int) - expected.astype(int))
    assert difference.max() <= 1
    assert (difference == 0).mean() > 0.99
    assert len(set(ours.ravel().tolist())) > 200
