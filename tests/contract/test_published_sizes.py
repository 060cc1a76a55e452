"""The models of random weights have the sizes that are published; a small one is compiled and answers."""

from pathlib import Path

import pytest
import torch
import transformers

from neuronpipe.compiler import random_models
from neuronpipe.measure.benchmark.matrix import IMAGE_TOKENS, PUBLISHED_SIZES
from neuronpipe.measure.load.inputs import builtin_texts
from tests.models.compiling import compile_model

# All parameters of the published checkpoints' bodies, in millions, from their cards and papers.
_BODIES = {
    "bert-base-uncased": 109.5,
    "bert-large-uncased": 335.1,
    "distilbert-base-uncased": 66.4,
    "roberta-base": 124.6,
    "albert-base-v2": 11.7,
    "modernbert-base": 149.0,
    "vit-base-patch16-224": 86.6,
}

pytestmark = pytest.mark.sampled


@pytest.mark.parametrize("name", PUBLISHED_SIZES)
def test_a_model_has_its_published_size(name: str) -> None:
    config = random_models._CONFIGURATIONS[name]()
    with torch.device("meta"):
        model = (
            transformers.AutoModelForImageClassification if config.model_type == "vit" else transformers.AutoModel
        ).from_config(config)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    assert sum(sizes.values()) / 1e6 == pytest.approx(_BODIES[name], rel=0.01)
    computing = sum(size for name, size in sizes.items() if "embeddings" not in name and "pooler" not in name)
    if config.model_type == "albert":  # its layers share their parameters, and all of them compute
        computing *= config.num_hidden_layers
    assert computing / 1e6 == pytest.approx(PUBLISHED_SIZES[name], rel=0.03)


_SMALL = {
    **dict.fromkeys(("hidden_size", "dim", "embedding_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_heads"), 2),
    **dict.fromkeys(("intermediate_size", "hidden_dim"), 64),
}


@pytest.mark.parametrize("name", [name for name in PUBLISHED_SIZES if name != "bert-large-uncased"])
def test_random_weights_are_the_same_each_time_and_are_compiled(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = random_models._CONFIGURATIONS[name]()
    fields = config.to_dict()
    changes = {field: value for field, value in _SMALL.items() if field in fields}
    if "layer_types" in fields:
        changes["layer_types"] = fields["layer_types"][:2]
    small = type(config).from_dict(fields | changes)
    monkeypatch.setattr(random_models, "_CONFIGURATIONS", {name: lambda: small})
    for folder in ("one", "two"):
        random_models.save_random_model(name, tmp_path / folder, builtin_texts(0))
    first, second = ((tmp_path / folder / "model.safetensors").read_bytes() for folder in ("one", "two"))
    assert first == second
    spec = compile_model(tmp_path / "one", tmp_path / "repository", name="small").spec
    if config.model_type == "vit":  # images count without the class
        assert (spec.task, spec.max_tokens, len(spec.labels)) == ("image_classification", IMAGE_TOKENS - 1, 1000)
    else:
        assert (spec.task, spec.max_tokens) == ("text_classification", 512)
