"""Models that are published as an ONNX graph alone answer as sentence-transformers and ONNX Runtime compute them."""

import inspect
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling

from neuronpipe.api.v1.tasks_pb2 import SentenceEmbeddingInput, TaskInput, TextClassificationInput
from neuronpipe.compiler import PipelineOptions
from neuronpipe.core.errors import SetupError
from tests.contract.inference import infer_all
from tests.models.architectures import make_source
from tests.models.compiling import compile_model

pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.sampled

_TEXTS = ["one text", "the quick brown fox", "words " * 8]
_TOLERANCE = 5e-5


def _only_graph(folder: Path, auto_class: Any, outputs: Sequence[str]) -> Path:
    """Puts an ONNX graph, as optimum names its inputs and outputs, in the place of the weights."""
    model = auto_class.from_pretrained(folder).eval()
    accepted = inspect.signature(model.forward).parameters
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    names = [name for name in tokenizer.model_input_names if name in accepted]

    class Graph(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            result = self.model(**dict(zip(names, tensors, strict=True)), return_dict=True)
            return tuple(result[name] for name in outputs)

    axes = {name: {0: "batch", 1: "tokens"} for name in names}
    axes |= {name: {0: "batch", 1: "tokens"} if name != "logits" else {0: "batch"} for name in outputs}
    (folder / "onnx").mkdir()
    example = tuple(torch.ones(2, 7, dtype=torch.int64) for _ in names)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        named: Any = {"input_names": names, "output_names": list(outputs), "dynamic_axes": axes}
        torch.onnx.export(Graph(), example, str(folder / "onnx" / "model.onnx"), **named, dynamo=False)
    (folder / "model.safetensors").unlink()
    return folder


def _compile(source: Path, folder: Path, task: str = "", **options: Any) -> tuple[Any, str]:
    lines: list[str] = []
    bundle = compile_model(source, folder / "repository", task, report=lines.append, **options)
    return bundle, "\n".join(lines)


@pytest.mark.parametrize("architecture", ["BERT", "XLM-R"])
async def test_vectors_of_a_graph_equal_those_of_sentence_transformers(architecture: str, tmp_path: Path) -> None:
    base = make_source(tmp_path / "base", architecture, "sentence_embedding")
    torch.manual_seed(7)
    modules = [Transformer(str(base)), Pooling(32, ("mean", "cls"), include_prompt=False), Dense(64, 16)]
    model = SentenceTransformer(modules=modules, prompts={"query": "query: "}, truncate_dim=12, device="cpu")
    model.save(str(tmp_path / "model"))
    bundle, printed = _compile(_only_graph(tmp_path / "model", transformers.AutoModel, ["last_hidden_state"]), tmp_path)
    assert "model.onnx, as it is; compared with ONNX Runtime" in printed
    assert bundle.manifest.artifacts[0].accuracy.largest_difference < _TOLERANCE
    inputs = [SentenceEmbeddingInput(text=text, prompt_name="query", skip_normalize=True) for text in _TEXTS]
    results = await infer_all(bundle.folder, [TaskInput(sentence_embedding=input) for input in inputs])
    ours = np.array([result.sentence_embedding.embedding for result in results], np.float32)
    np.testing.assert_allclose(ours, model.encode(_TEXTS, prompt_name="query"), rtol=0, atol=_TOLERANCE)


async def test_labels_of_a_graph_equal_those_of_onnx_runtime(tmp_path: Path) -> None:
    source = make_source(tmp_path / "source", "DistilBERT", "text_classification")
    reference = transformers.pipeline("text-classification", str(source), top_k=None)(_TEXTS)
    _only_graph(source, transformers.AutoModelForSequenceClassification, ["logits"])
    bundle, _ = _compile(source, tmp_path)
    assert "zero_shot_classification" in bundle.spec.tasks
    inputs = [TaskInput(text_classification=TextClassificationInput(text=text, top_k=3)) for text in _TEXTS]
    for result, expected in zip(await infer_all(bundle.folder, inputs), reference, strict=True):
        found = {label.label: label.score for label in result.text_classification.labels}
        for label in expected:
            assert found[label["label"]] == pytest.approx(label["score"], abs=_TOLERANCE)


def test_what_a_graph_cannot_have_is_refused(tmp_path: Path) -> None:
    source = make_source(tmp_path / "source", "BERT", "fill_mask")
    _only_graph(source, transformers.AutoModelForMaskedLM, ["logits"])
    only = "has no weights of PyTorch, only the graph model.onnx"
    with pytest.raises(SetupError, match=f"{only}, and fill-mask changes the model within; of graphs there are"):
        _compile(source, tmp_path)
    with pytest.raises(
        SetupError, match="has no output last_hidden_state, which the task needs, only logits; export it"
    ):
        _compile(source, tmp_path, "feature_extraction")
    with pytest.raises(SetupError, match=f"{only}, which the back end openvino takes; leave out --backend torch"):
        _compile(source, tmp_path, "feature_extraction", backend="torch")
    with pytest.raises(SetupError, match=f"{only}, which is not cut into parts"):
        _compile(source, tmp_path, "feature_extraction", pipeline=PipelineOptions(2))
    (source / "onnx" / "model.onnx").write_bytes(b"0" * 40)
    with pytest.raises(SetupError, match=r"model\.onnx: ONNX Runtime cannot load it: "):
        _compile(source, tmp_path, "feature_extraction")
    (source / "onnx" / "model.onnx").rename(source / "onnx" / "model_q4.onnx")
    (source / "onnx" / "model_fp16.onnx").write_bytes(b"0")
    with pytest.raises(SetupError, match=r"has several ONNX graphs, and none is model\.onnx"):
        _compile(source, tmp_path, "feature_extraction")
    assert json.loads((source / "config.json").read_text())["architectures"] == ["BertForMaskedLM"]
