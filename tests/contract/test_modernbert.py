"""ModernBERT with masks of ours computes what transformers' does, by each kind of attention."""

from pathlib import Path

import pytest
import torch
import transformers

from neuronpipe.compiler.weights import load_weights
from tests.models.architectures import make_source

_HEADS = {
    "text_classification": transformers.AutoModelForSequenceClassification,
    "question_answering": transformers.AutoModelForQuestionAnswering,
    "fill_mask": transformers.AutoModelForMaskedLM,
    "feature_extraction": transformers.AutoModel,
}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("task", _HEADS)
def test_it_computes_what_transformers_does(task: str, attention: str, tmp_path: Path) -> None:
    source = make_source(tmp_path / "source", "ModernBERT", task)
    original, ours = _HEADS[task].from_pretrained(source).eval(), load_weights(_HEADS[task], source)
    for model in (original, ours):
        model.set_attn_implementation(attention)
    ids = torch.randint(5, original.config.vocab_size, (3, 64), generator=torch.Generator().manual_seed(7))
    # The last 54 of the second text are padding: beyond what its tokens see through a window of 16.
    mask = (torch.arange(64)[None] < torch.tensor([[64], [10], [40]])).long()
    with torch.inference_mode():
        expected, found = (model(input_ids=ids, attention_mask=mask)[0] for model in (original, ours))
    if found.shape[:2] == ids.shape:
        expected, found = expected[mask.bool()], found[mask.bool()]
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
