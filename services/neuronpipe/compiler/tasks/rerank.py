"""Compiles for reranking: the logit of a cross-encoder, a classifier of pairs with one label, or of a decoder's yes."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from neuronpipe.compiler.decoder_rerankers import encode_written, load_decoder_reranker
from neuronpipe.compiler.modules import Batch, SourceModule
from neuronpipe.compiler.sentence_transformers import read_json, transformer_folder
from neuronpipe.compiler.tasks import text_classification
from neuronpipe.compiler.tasks.base import encode_texts
from neuronpipe.compiler.tokenizers import SourceTokenizer

# The first words of a text are its query. Like a real query, it is short, and has words of its text.
_QUERY_WORDS = 8


def _load(folder: Path, tokenizer: SourceTokenizer) -> SourceModule:
    (architecture, *_) = read_json(transformer_folder(folder) / "config.json").get("architectures") or ("",)
    if str(architecture).endswith("ForCausalLM"):
        return load_decoder_reranker(folder, tokenizer)
    return text_classification.load_classifier(folder, tokenizer, "rerank")


def _encode(module: SourceModule, texts: Sequence[str]) -> Batch:
    queries = [" ".join(text.split()[:_QUERY_WORDS]) for text in texts]
    template = module.fact("template")
    return encode_written(module, template, queries, texts) if template else encode_texts(module, texts, queries)


TASK = replace(text_classification.TASK, load=_load, encode=_encode)
