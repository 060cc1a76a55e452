"""The model behind LitServe, Ray Serve, Triton and infinity: as a person writes it with transformers and torch, or, to
compare like with like, the OpenVINO graph of our bundle and the tokenizer in Rust.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

MAX_TOKENS = 128
# A folder that holds it has a graph; see `export_graph` of tests/bench/against_peers.py.
GRAPH_FILE = "graph.json"
# As our back end pads: fewer shapes that OpenVINO meets for the first time.
_TOKEN_STEP = 4
_FIELDS = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}

# (likeliest label, its probability) of each text. One call is one batch, padded to its longest text.
Classify: TypeAlias = Callable[[Sequence[str]], list[tuple[str, float]]]


def load_classifier(source: str, threads: int) -> Classify:
    """The classifier of a folder, on so many CPUs."""
    return load_graph(source, threads) if (Path(source) / GRAPH_FILE).is_file() else _load_torch(source, threads)


def load_graph(source: str, threads: int) -> Classify:
    """OpenVINO's graph with the properties that our back end gives it, one stream of so many threads."""
    import numpy as np
    import openvino
    import tokenizers

    folder = Path(source)
    described = json.loads((folder / GRAPH_FILE).read_text())
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(MAX_TOKENS)
    tokenizer.enable_padding(pad_to_multiple_of=_TOKEN_STEP)
    # Pinned, the threads of several processes would share one CPU.
    config = {"NUM_STREAMS": "1", "INFERENCE_NUM_THREADS": str(threads), "ENABLE_CPU_PINNING": "NO"}
    compiled = openvino.Core().compile_model(folder / "model.xml", "CPU", {**described["properties"], **config})
    request, labels = compiled.create_infer_request(), described["labels"]
    fields = {port.any_name: _FIELDS[port.any_name] for port in compiled.inputs}

    def classify(texts: Sequence[str]) -> list[tuple[str, float]]:
        encoded = tokenizer.encode_batch_fast(list(texts))
        request.infer(
            {name: np.array([getattr(text, field) for text in encoded], np.int32) for name, field in fields.items()},
            share_inputs=True,
        )
        logits = request.get_output_tensor(0).data
        scores = np.exp(logits - logits.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        best = scores.argmax(-1)
        return [(labels[index], float(row[index])) for index, row in zip(best, scores, strict=True)]

    return classify


def _load_torch(source: str, threads: int) -> Classify:
    import torch
    import transformers

    torch.set_num_threads(threads)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(source, dtype=torch.float32).eval()
    labels = model.config.id2label

    def classify(texts: Sequence[str]) -> list[tuple[str, float]]:
        inputs = tokenizer(list(texts), padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt")
        with torch.inference_mode():
            scores, indices = model(**inputs).logits.softmax(-1).max(-1)
        return [(labels[index], score) for index, score in zip(indices.tolist(), scores.tolist(), strict=True)]

    return classify
