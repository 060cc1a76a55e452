"""Longformer, compiled as one graph for all lengths, computes what transformers' windows do."""

from pathlib import Path

import pytest
import torch
import transformers

from neuronpipe.compiler.architectures import prepare
from neuronpipe.compiler.weights import load_weights
from tests.models.architectures import TEXT_ARCHITECTURES, make_source

# Of a head that has tokens see all others, and of heads that have not.
_HEADS = {
    "text_classification": transformers.AutoModelForSequenceClassification,
    "question_answering": transformers.AutoModelForQuestionAnswering,
    "fill_mask": transformers.AutoModelForMaskedLM,
    "token_classification": transformers.AutoModelForTokenClassification,
    "feature_extraction": transformers.AutoModel,
}


@pytest.mark.parametrize("task", _HEADS)
@pytest.mark.parametrize("tokens", [5, 8, 31, 64])
def test_it_computes_what_transformers_does(task: str, tokens: int, tmp_path: Path) -> None:
    source = make_source(tmp_path / "source", "Longformer", task)
    original = _HEADS[task].from_pretrained(source).eval()
    ours = load_weights(_HEADS[task], source)
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(5, original.config.vocab_size, (2, tokens), generator=generator)
    separator, padding = original.config.sep_token_id, original.config.pad_token_id
    ids[ids == separator] = 5
    # transformers wants three separators of each row: behind the question, before the context, and at the end.
    for row, end in ((0, tokens), (1, max(tokens - 6, 5))):
        ids[row, [2, 3, end - 1]] = separator
        ids[row, end:] = padding
    mask = (ids != padding).long()
    with torch.inference_mode():
        expected, found = (model(input_ids=ids, attention_mask=mask) for model in (original, ours))
    for name in found:
        if found[name] is None:
            continue
        computed, wanted = found[name], expected[name]
        if computed.shape[:2] == ids.shape:  # outputs at padding differ, and nobody reads them
            computed, wanted = computed[mask.bool()], wanted[mask.bool()]
        torch.testing.assert_close(computed, wanted, rtol=0, atol=2e-5)


def test_a_window_hides_what_is_beyond_it(tmp_path: Path) -> None:
    source = make_source(tmp_path / "source", "Longformer", "feature_extraction")
    model = load_weights(transformers.AutoModel, source)
    assert TEXT_ARCHITECTURES["Longformer"].config["attention_window"] == [8, 8]
    ids = torch.arange(10, 50)[None]
    changed = ids.clone()
    changed[0, 0] = 60
    with torch.inference_mode():
        before, after = (model(input_ids=rows, attention_mask=torch.ones_like(rows))[0] for rows in (ids, changed))
    # Two layers of four tokens to each side: the ninth is the first that cannot see the change.
    is_same = (before == after).all(dim=-1)[0]
    assert not is_same[:9].any()
    assert is_same[9:].all()


def test_what_is_prepared_twice_is_the_same(tmp_path: Path) -> None:
    source = make_source(tmp_path / "source", "Longformer", "text_classification")
    model = load_weights(transformers.AutoModelForSequenceClassification, source)
    ids = torch.arange(10, 40)[None]
    with torch.inference_mode():
        once = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        prepare(model)
        assert torch.equal(model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits, once)
