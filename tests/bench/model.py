"""The model of the benchmark against other systems: MiniLM's body, as PyPI has it, with a two-label head made from a
seed.

Run: python -m tests.bench.model FOLDER TEXTS  makes FOLDER and prints what transformers answers to the texts of the
JSON file TEXTS.
"""

import json
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import transformers

from demo.model import find_minilm
from tests.bench.peers.classifier import MAX_TOKENS

LABELS = ["calm", "busy"]


def make_source(folder: Path) -> Path:
    """Saves the model in float32, and its tokenizer, as transformers 4 and 5 read them."""
    labels = dict(enumerate(LABELS))
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        find_minilm(), dtype=torch.float32, id2label=labels, label2id={label: index for index, label in labels.items()}
    )
    with torch.no_grad():
        for name, parameter in model.classifier.named_parameters(prefix="classifier"):
            generator = np.random.default_rng(zlib.crc32(name.encode()))
            parameter.copy_(torch.from_numpy(generator.standard_normal(tuple(parameter.shape)).astype(np.float32)))
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(find_minilm(), model_max_length=MAX_TOKENS).save_pretrained(folder)
    return folder


def reference_answers(source: Path, texts: Sequence[str]) -> list[tuple[str, str, float]]:
    """(text, its likeliest label, that label's probability), each text computed alone."""
    pipeline = transformers.pipeline("text-classification", model=str(source), dtype=torch.float32, device="cpu")
    answers = [pipeline(text, truncation=True, max_length=MAX_TOKENS)[0] for text in texts]
    return [(text, answer["label"], answer["score"]) for text, answer in zip(texts, answers, strict=True)]


if __name__ == "__main__":
    target = Path(sys.argv[1])
    source = target if (target / "config.json").is_file() else make_source(target)
    print(json.dumps(reference_answers(source, json.loads(Path(sys.argv[2]).read_text()))))
