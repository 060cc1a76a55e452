"""Measures which architecture works for which task on which back end, and writes docs/models.json and the page made of
it, docs/models.md.

Run: python -m tests.documentation.measured_models
         measures what is missing or of other versions, and writes both files; all of it takes half an hour
     python -m tests.documentation.measured_models --page
         prints the page of what was measured
"""

import json
import os
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import openvino
import torch
import transformers

from neuronpipe.compiler import NO_BUCKETS, BucketRequest, CompileRequest, NeuronxOptions, compile_bundle
from neuronpipe.core.errors import SetupError
from neuronpipe.stages.neuron_executor.runtimes.neuron import DOUBLES_VARIABLE
from tests.documentation.checkpoints import CHECKPOINTS, table
from tests.models.architectures import ARCHITECTURES, MAX_TOKENS, make_source, tasks_of

_DOCS = Path(__file__).parents[2] / "docs"
RECORD, PAGE = _DOCS / "models.json", _DOCS / "models.md"
_DOUBLES = Path(__file__).parents[1] / "doubles"

# What is measured, with the tasks that the same graph serves.
GRAPHS: Mapping[str, tuple[str, ...]] = {
    "text_classification": ("text_classification", "rerank", "zero_shot_classification"),
    "token_classification": ("token_classification",),
    "question_answering": ("question_answering",),
    "fill_mask": ("fill_mask",),
    "sentence_embedding": ("sentence_embedding", "sentence_similarity"),
    "feature_extraction": ("feature_extraction",),
    "sparse_embedding": ("sparse_embedding",),
    "multi_vector_embedding": ("multi_vector_embedding",),
    "image_classification": ("image_classification",),
    "image_embedding": ("image_embedding",),
    "zero_shot_image_classification": ("zero_shot_image_classification",),
    "zero_shot_token_classification": ("zero_shot_token_classification",),
}
_BACKENDS: Mapping[str, str] = {"openvino": "OpenVINO", "torch": "torch", "neuronx": "Neuron (double)"}

Record: TypeAlias = Mapping[str, Any]


def measure(architecture: str, task: str, backend: str, folder: Path) -> dict[str, Any]:
    """What became of compiling a model: its largest difference to PyTorch float32 on sample inputs, or the reason why
    there is none.
    """
    row: dict[str, Any] = {"architecture": architecture, "task": task, "backend": backend}
    request = CompileRequest(
        source=str(make_source(folder / "source", architecture, task)),
        task=task,
        repository=folder / "repository",
        name="model",
        backend=backend,
        buckets=BucketRequest(("4x16", f"4x{MAX_TOKENS}")) if backend == "neuronx" else NO_BUCKETS,
        neuronx=NeuronxOptions(cache=folder / "cache"),
    )
    try:
        accuracy = compile_bundle(request, lambda line: None).manifest.artifacts[0].accuracy
    except SetupError as error:
        return row | {"reason": str(error).removeprefix(f"{folder / 'source'}: ")}
    assert accuracy is not None
    return row | {
        "difference": accuracy.largest_difference,
        "agreement": accuracy.agreement,
        "samples": accuracy.samples,
    }


def backends_of(task: str) -> tuple[str, ...]:
    """Where a task is measured: on the double of Neuron, which computes with PyTorch, once for each architecture."""
    return tuple(_BACKENDS) if task == "text_classification" else ("openvino", "torch")


def wanted() -> list[tuple[str, str, str]]:
    """Architecture, task and back end of every row."""
    pairs = [
        (architecture, task) for architecture in ARCHITECTURES for task in GRAPHS if task in tasks_of(architecture)
    ]
    return [(architecture, task, backend) for architecture, task in pairs for backend in backends_of(task)]


def measure_missing() -> None:
    """Writes the record with all rows, of which those that it has of these versions are not measured again."""
    _use_double()
    torch.set_num_threads(1)
    versions = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "openvino": openvino.__version__.partition("-")[0],
    }
    before = json.loads(RECORD.read_text()) if RECORD.is_file() else {}
    rows = {_key(row): row for row in before.get("rows", ()) if before["versions"] == versions}
    for key in wanted():
        if key in rows:
            continue
        with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
            warnings.simplefilter("ignore")
            rows[key] = measure(*key, Path(folder))
        print(rows[key], file=sys.stderr, flush=True)
        ordered = [rows[key] for key in wanted() if key in rows]
        RECORD.write_text(json.dumps({"versions": versions, "rows": ordered}, indent=1) + "\n")


def _key(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return row["architecture"], row["task"], row["backend"]


def _use_double() -> None:
    """The contract double of the Neuron SDK, as tests/conftest.py's neuron_double."""
    sys.path.insert(0, str(_DOUBLES))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(_DOUBLES), os.environ.get("PYTHONPATH", "")])
    os.environ[DOUBLES_VARIABLE] = "1"
    os.environ["NEURON_DOUBLE_DEVICES"] = "1"
    os.environ["NEURON_DOUBLE_FOLDER"] = tempfile.mkdtemp()


def page(record: Record) -> str:
    """docs/models.md."""
    rows: Sequence[Record] = record["rows"]
    reasons = list(dict.fromkeys(row["reason"] for row in rows if "reason" in row))
    cells = {_key(row): _cell(row, reasons) for row in rows}
    largest = {
        backend: max(row.get("difference", 0) for row in rows if row["backend"] == backend) for backend in _BACKENDS
    }
    samples = max(row.get("samples", 0) for row in rows)
    parts = [_CHECKPOINTS.format(table=table(json.loads(CHECKPOINTS.read_text())))]
    parts.append(_HEAD.format(samples=samples, **record["versions"]))
    for task, served in GRAPHS.items():
        tested = [name for name in dict.fromkeys(row["architecture"] for row in rows) if task in tasks_of(name)]
        parts.append(f"\n### {', '.join(name.replace('_', '-') for name in served)}\n\n")
        backends = backends_of(task)
        parts.append(
            f"| Architecture | {' | '.join(_BACKENDS[backend] for backend in backends)} "
            f"|\n|---|{'---|' * len(backends)}\n"
        )
        parts += [f"| {name} | {' | '.join(cells[name, task, backend] for backend in backends)} |\n" for name in tested]
    if reasons:
        parts.append("\n### What does not work\n\n")
        parts += [f"{number}. {reason}\n" for number, reason in enumerate(reasons, start=1)]
    bounds = ", ".join(f"{_BACKENDS[backend]} {difference:.0e}" for backend, difference in largest.items())
    parts.append(f"\nThe largest difference of each back end over all of them: {bounds}.\n")
    return "".join(parts) + _TAIL


def _cell(row: Record, reasons: Sequence[str]) -> str:
    return (
        f"no ({reasons.index(row['reason']) + 1})"
        if "reason" in row
        else f"{row['difference']:.0e}"
        if row["difference"]
        else "0"
    )


_CHECKPOINTS = """# Supported models

This page is for engineers who want to know whether a model works. The first table lists well-known checkpoints, as
`neuronpipe compile CHECKPOINT` compiles them. The last column is one of these:

- *measured*: the published weights were compiled for OpenVINO. For each dtype, the column shows the largest difference
  from PyTorch float32, the agreement (for vectors the smallest cosine), and the size of the bundle.
- *by configuration*: the tests compare a small model of this configuration, with random weights, but not the published
  weights.
- *refused*: `compile` refuses the model for this reason.

{table}
"""

_HEAD = """## Architectures

These tables list the architectures that work for each task on each back end. A cell is the largest absolute difference
of an output from PyTorch float32, over up to {samples} sample inputs of all lengths. Each architecture was measured on
a small model (two to four layers, width 32, up to 64 tokens, or images of 32 x 32 pixels), whose outputs are up to 50,
with transformers {transformers}, torch {torch} and OpenVINO {openvino}.

Neuron is the contract double of its SDK, with buckets, and not a device. The double computes with PyTorch, so one task
for each architecture suffices. `tests/oracle/` shows that every architecture answers as transformers' pipelines do.

Do not edit this page: `make fix-models` makes it from docs/checkpoints.json and docs/models.json, which it measures.
"""

_TAIL = """
## Notes

- **Lengths.** The positions and the tokenizer (`model_max_length`) of a model limit its tokens; `max_seq_length` of
  sentence-transformers replaces the limit of the tokenizer. Without any limit, a model takes 512 tokens. RoBERTa,
  XLM-R, CamemBERT, MPNet and Longformer count positions from after the padding id, which costs them two positions.
  DeBERTa-v3 uses distances instead of positions, but is limited to `max_position_embeddings`, the lengths of its
  training.
- **DistilBERT, RoBERTa, XLM-R, CamemBERT, MPNet, ModernBERT** take no token types. neuronpipe leaves out other inputs
  that a tokenizer makes.
- **MobileBERT** also reads the neighbours of each token. Padding looks like the zeros after a text's last
  token, so that a text has the same outputs in every batch.
- **Decoders** (Llama, Mistral, Qwen2, Qwen3, Gemma) attend as their configuration says: to the tokens before each
  token, in some layers through a window, or with `is_causal: false` and `use_bidirectional_attention` to all tokens.
  gte-Qwen2 and stella_en_1.5B_v5 attend to all tokens, as their own code does (`modeling_qwen.Qwen2Model`), which
  neuronpipe does not run. The same is true of embedders of the model type `llama_bidirec` (llama-nemotron-embed). The
  compiler refuses an embedder with other code of its own, unless its `config.json` has `is_causal`. Padding is on the
  right and has no effect, even if the tokenizer says left.
  [Rerankers](compiling.md#decoders-that-rank) have one or two rows of the head. The compiler refuses other kinds of
  decoders, and names them. For models that take more, samples have up to 4,096 tokens.
- **BART, mBART and T5** classify and answer questions by an encoder and a decoder in one execution. The decoder reads
  the text again. `facebook/bart-large-mnli`, the default of transformers' zero-shot pipeline, is such a model. Not
  supported for them: `--pipeline-cores`.
- **Encoders of T5** make vectors: `sentence-transformers/sentence-t5-base`, `sentence-transformers/gtr-t5-base`,
  mT5, UMT5, and the encoder of any `T5ForConditionalGeneration`.
- **Instructor** (`hkunlp/instructor-base`) takes its instructions as prompts, which its pooling excludes. Write the
  instructions as `prompts` into `config_sentence_transformers.json`. A request chooses a prompt by `prompt_name`.
- **Longformer** has full attention with a mask of each token's window. The numbers equal transformers' windows, but the
  memory grows with the square of a text's tokens.
- **Nomic BERT, GTE** compile from transformers' form and from the published form, whose own code neuronpipe does not
  run. The compiler refuses features that only this code computes (rotary embeddings of a part, `mixed_b`), and names
  them. Nomic BERT with experts (nomic-embed-text-v2-moe) has a graph of neuronpipe, for embeddings. With openvino an
  expert computes its own tokens; on other back ends and in int8 each expert computes all tokens.
- **Jina v2** (`jina-embeddings-v2-*`, "code" is `jina-embeddings-v2-base-code`, and `jina-reranker-v1-*`) has a graph
  of neuronpipe, because transformers does not contain this architecture. Its attention adds a number for each pair of
  tokens and each head.
- **Jina's XLM-R** (`XLMRobertaFlashConfig`) is XLM-R with other names of the weights (jina-reranker-v2). With rotary
  positions, it is the body of jina-embeddings-v3-hf (jina-colbert-v2). The compiler refuses adapters
  (jina-embeddings-v3).
- **GLiNER** scores spans (`markerV0`) or tokens (`token_level`). The compiler refuses models with an encoder for labels
  (`gliner-bi-*`), with a decoder, of relations, with `represent_spans`, and GLiNER2, and names them.
- **Snowflake's arctic-embed**: -xs, -s and -m are BERT, -m-long is Nomic BERT, -m-v2.0 is GTE, and -l and -l-v2.0 are
  BERT and XLM-R.
- **SPLADE** is any masked language model with `SpladePooling`, also as the document side of a `Router` whose queries
  have `SparseStaticEmbedding` (opensearch-neural-sparse doc-v3): `prompt_name` chooses the side, and the tokenizer
  alone answers queries. The compiler refuses other modules of sparse models, and other Routers, and names them.
- **bge-m3** with `sparse_linear.pt` and `colbert_linear.pt` is one bundle for sentence-embedding, sparse-embedding,
  multi-vector-embedding and rerank (by its token vectors), whose graph computes all outputs at once.
- **Static embeddings** are folders of sentence-transformers' `StaticEmbedding` and of model2vec (potion). Each is read
  as its library does; model2vec leaves out unknown tokens. Send texts in lists (`texts` of
  [sentence-embedding](tasks.md#sentence-embedding), or a list over HTTP): in a list of 256, a text takes an eighth of
  the CPU time of a request.
- **ColBERT** compiles from the folders that sentence-transformers, PyLate and Stanford's ColBERT save.
- **ModernBERT** has masks of neuronpipe, in which padding attends to itself. Otherwise windows of padding alone would
  be NaN in OpenVINO's attention.
- **UltraBERT, EmbeddingGemma 2 and OpenAI's privacy filter**, which transformers 5 contains, attend to windows in both
  directions. For OpenVINO the compiler takes their eager attention. Of EmbeddingGemma 2 it compiles the part for texts.
- **BigBird** takes (5 + 2 x num_random_blocks) x block_size tokens, 704 as it is published. Up to this length,
  transformers also computes full attention. Beyond it transformers computes sparse blocks, which no graph for all
  lengths can contain.
- **Tokenizers** are WordPiece, byte-level BPE and Unigram (SentencePiece). The compiler converts other forms to
  tokenizer.json.
- **Image processors** are transformers' processors on Pillow ("slow" in transformers 4, "Pil" in 5), which resize, crop
  the centre, rescale and normalize: ViT's, which Swin uses, DeiT's, BEiT's, ConvNeXt's, CLIP's and similar processors.
  The compiler compares the pixels of sample images with the processor. It refuses a processor that does more than its
  options say (LeViT's, EfficientNet's), `do_pad`, `do_flip_channel_order`, and sizes that depend on the image.
  torchvision's processors round differently.
- **Images** also compile in int8 (`--calibration FOLDER`) and for neuronx.
- **CLIP and SigLIP** (SigLIP 2 of one size is SigLIP) take images and texts in one bundle, on OpenVINO and torch. The
  compiler refuses a tokenizer of SigLIP that masks padding, or that exists only in Python. It also compiles their parts
  for images or texts alone (`CLIPTextModelWithProjection`), and DPR's encoders. Folders of sentence-transformers
  (clip-ViT-B-32) may have a `Normalize` module.
- **Vectors of images** are a model's pooled output (`pooler_output`), or CLIP's and SigLIP's projections. For
  **DINOv2** the compiler computes the positions for the size of its image processor.
"""


def main(arguments: Sequence[str]) -> None:
    """See above."""
    if arguments == ["--page"]:
        print(page(json.loads(RECORD.read_text())), end="")
        return
    measure_missing()
    PAGE.write_text(page(json.loads(RECORD.read_text())))


if __name__ == "__main__":
    main(sys.argv[1:])
