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

Checkpoints that people know, as `neuronpipe compile CHECKPOINT` compiles them. In the last column:

- *measured*: the published weights were compiled for OpenVINO. Number types have the largest difference to PyTorch
  float32, the agreement (for vectors the smallest cosine), and the size of the bundle.
- *by configuration*: a small model of this configuration, with random weights, is compared in the tests. The published
  weights are not.
- *refused*: `compile` names the reason.

{table}
"""

_HEAD = """## Architectures

Which architecture works for which task on which back end, with the largest absolute difference of an output to
PyTorch float32 over up to {samples} sample inputs of all lengths. Measured on small models of each (two to four
layers, width 32, up to 64 tokens, or images of 32 x 32 pixels), whose outputs are up to 50, with transformers
{transformers}, torch {torch} and OpenVINO {openvino}.

Neuron is the contract double of its SDK, with buckets: no device was involved. It computes with PyTorch, so one task
for each architecture is enough. That every architecture answers as transformers' pipelines do is what `tests/oracle/`
shows.

This page is made by `make fix-models` of docs/checkpoints.json, and of docs/models.json, which it measures; never edit
the page.
"""

_TAIL = """
## Notes

- **Lengths.** A model takes as many tokens as its positions and its tokenizer (`model_max_length`) allow, or instead of
  the tokenizer sentence-transformers (`max_seq_length`); 512 where nothing limits it. RoBERTa, XLM-R, CamemBERT, MPNet
  and Longformer begin to count after the padding id, which costs them two positions. DeBERTa-v3 knows distances, not
  positions, and is held to `max_position_embeddings` all the same: it was trained on no more.
- **DistilBERT, RoBERTa, XLM-R, CamemBERT, MPNet, ModernBERT** take no token types: what a tokenizer gives beyond a
  model's inputs is left out.
- **MobileBERT** sees of each token its neighbours too. Padding is made to look like the zeros behind a text's last
  token, so that a text has the same outputs in every batch.
- **Decoders** (Llama, Mistral, Qwen2, Qwen3, Gemma) see what their configuration says: the tokens before each one, in
  some layers through a window, or with `is_causal: false` and `use_bidirectional_attention` all of them. gte-Qwen2
  and stella_en_1.5B_v5 see all of them, as by their own code (`modeling_qwen.Qwen2Model`), which is not run, and so do
  embedders of the model type `llama_bidirec` (llama-nemotron-embed). An
  embedder with other code of its own is refused unless its `config.json` has `is_causal`. Padding is at the right
  and changes nothing, also where the tokenizer names the left. [Rerankers](compiling.md#decoders-that-rank) have one
  or two rows of the head. Decoders of other kinds are refused by name. Samples have up to 4,096 tokens, where a model
  takes more.
- **BART, mBART and T5** classify and answer questions by an encoder and a decoder in one execution. The decoder reads
  the text once more. `facebook/bart-large-mnli`, the default of transformers' zero-shot pipeline, is such a model. They
  are not cut into parts (`--pipeline-cores`).
- **Encoders of T5** make vectors: `sentence-transformers/sentence-t5-base`, `sentence-transformers/gtr-t5-base`,
  mT5, UMT5, and the encoder of any `T5ForConditionalGeneration`.
- **Instructor** (`hkunlp/instructor-base`) takes its instructions as prompts, which its pooling leaves out. Write them
  as `prompts` into `config_sentence_transformers.json`. A request names one as `prompt_name`.
- **Longformer** has full attention with a mask that leaves out what is beyond a token's window: the same numbers as
  transformers' windows, with memory for the square of a text's tokens.
- **Nomic BERT, GTE** are read as transformers has them and as they are published, with code of their own, which is not
  run. What that code alone computes (rotary embeddings of a part, `mixed_b`) is refused by its name. Nomic BERT with
  experts (nomic-embed-text-v2-moe) is a graph of our own, for embeddings: with openvino an expert computes its own
  tokens, on the other back ends and in int8 each computes all.
- **Jina v2** (`jina-embeddings-v2-*`, "code" is `jina-embeddings-v2-base-code`, and `jina-reranker-v1-*`) is a graph of
  our own, which transformers does not have. Its attention adds a number for each pair of tokens and each head.
- **Jina's XLM-R** (`XLMRobertaFlashConfig`) is XLM-R with the weights under other names (jina-reranker-v2), and with
  rotary positions the body of jina-embeddings-v3-hf (jina-colbert-v2). Adapters (jina-embeddings-v3) are refused.
- **GLiNER** scores spans (`markerV0`) or tokens (`token_level`). Refused by name are models with an encoder for labels
  (`gliner-bi-*`), with a decoder, of relations, and with `represent_spans`.
- **Snowflake's arctic-embed**: -xs, -s and -m are BERT, -m-long is Nomic BERT, -m-v2.0 is GTE, and -l and -l-v2.0 are
  BERT and XLM-R.
- **SPLADE** is any masked language model with `SpladePooling`, also as the document side of a `Router` whose queries
  have `SparseStaticEmbedding` (opensearch-neural-sparse doc-v3): `prompt_name` chooses the side, and the tokenizer
  alone answers queries. Other modules of sparse models, and other Routers, are refused by name.
- **bge-m3** with `sparse_linear.pt` and `colbert_linear.pt` is one bundle for sentence-embedding, sparse-embedding,
  multi-vector-embedding and rerank (by its token vectors), whose graph computes all outputs at once.
- **Static embeddings** are folders of sentence-transformers' `StaticEmbedding` and of model2vec (potion), as model2vec
  and sentence-transformers read each: model2vec leaves out unknown tokens. Send texts in lists (`texts` of
  [sentence-embedding](tasks.md#sentence-embedding), or a list over HTTP): in a list of 256, a text takes an eighth of
  the CPU time of a request.
- **ColBERT** is read as sentence-transformers, PyLate and Stanford's ColBERT save it.
- **ModernBERT** has masks of ours, in which padding sees itself: windows of padding alone would be NaN in OpenVINO's
  attention.
- **UltraBERT, EmbeddingGemma 2 and OpenAI's privacy filter**, which transformers 5 has, see windows in both directions:
  they compile for OpenVINO with eager attention. Of EmbeddingGemma 2 only the part for texts is compiled.
- **BigBird** takes (5 + 2 x num_random_blocks) x block_size tokens, 704 as it is published: up to there transformers
  too computes full attention instead of sparse blocks, which no graph for all lengths can hold.
- **Tokenizers** are WordPiece, byte-level BPE and Unigram (SentencePiece), converted to tokenizer.json where a model
  ships another form.
- **Image processors** are those of transformers on Pillow ("slow" in transformers 4, "Pil" in 5), which resize, crop
  the centre, rescale and normalize: ViT's, which Swin uses, DeiT's, BEiT's, ConvNeXt's, CLIP's and others like them.
  What the processor makes of sample images is compared at compilation, and one that does more than its options say
  (LeViT's, EfficientNet's) is refused, as are `do_pad`, `do_flip_channel_order` and sizes that depend on the image.
  torchvision's processors round otherwise.
- **Images** also compile in int8 (`--calibration FOLDER`) and for neuronx.
- **CLIP and SigLIP** (SigLIP 2 of one size is SigLIP) take images and texts in one bundle, on OpenVINO and torch. A
  tokenizer of SigLIP that masks padding is refused, as is one that is written in Python only. Their parts for images
  or texts alone (`CLIPTextModelWithProjection`) are compiled as well, as are DPR's encoders. Folders of
  sentence-transformers (clip-ViT-B-32) may have a `Normalize` module.
- **Vectors of images** are what a model pools (`pooler_output`), and CLIP's and SigLIP's projections. **DINOv2** has
  its positions computed for the size of its image processor.
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
