"""onnxruntime behind FastAPI as people write it: a function that computes each text alone, in FastAPI's threads.

POST / {"text"} → {"label", "score"}, or {"embedding"} of a folder without labels.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fastapi
import numpy as np
import onnxruntime
import tokenizers
import uvicorn
from pydantic import BaseModel

from tests.bench.peers.classifier import GRAPH_FILE, MAX_TOKENS
from tests.bench.peers.embedders_alone import ONNX_FILE
from tests.bench.peers.launching import end_with_parent, read_settings, say_ready_when_healthy
from tests.servers.ports import free_port

# What a worker process of uvicorn is told: the folder of the model, and the threads of a session.
_SOURCE, _THREADS = "BENCH_SOURCE", "BENCH_THREADS"


class Text(BaseModel):
    """A request."""

    text: str


def make_app() -> fastapi.FastAPI:
    """The application of a worker process."""
    folder = Path(os.environ[_SOURCE])
    answer = _load(folder, int(os.environ[_THREADS]))
    app = fastapi.FastAPI()

    @app.post("/")
    def infer(body: Text) -> dict[str, Any]:
        return answer(body.text)

    @app.get("/health")
    def health() -> dict[str, str]:
        return {}

    return app


def _load(folder: Path, threads: int) -> Callable[[str], dict[str, Any]]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(folder / ONNX_FILE, options, providers=["CPUExecutionProvider"])
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(MAX_TOKENS)
    names = {port.name for port in session.get_inputs()}
    described = folder / GRAPH_FILE
    labels: list[str] = json.loads(described.read_text())["labels"] if described.is_file() else []

    def answer(text: str) -> dict[str, Any]:
        encoded = tokenizer.encode(text)
        fields = {
            "input_ids": encoded.ids, "attention_mask": encoded.attention_mask, "token_type_ids": encoded.type_ids,
        }  # fmt: skip
        given = {name: np.array([field], np.int64) for name, field in fields.items() if name in names}
        (row,) = session.run(None, given)[0]
        if not labels:
            vector = row.mean(0)
            return {"embedding": (vector / np.linalg.norm(vector)).tolist()}
        scores = np.exp(row - row.max())
        scores /= scores.sum()
        return {"label": labels[scores.argmax()], "score": float(scores.max())}

    return answer


def main() -> None:
    """Serves until SIGTERM."""
    settings = read_settings(threads=1, workers=2)
    end_with_parent()
    os.environ |= {_SOURCE: settings.source, _THREADS: str(settings.threads)}
    port = free_port()
    say_ready_when_healthy(port)
    app = f"{__spec__.name}:make_app" if __spec__ else ""
    listen: dict[str, Any] = {"host": "127.0.0.1", "port": port, "log_level": "warning", "access_log": False}
    uvicorn.run(app, factory=True, workers=settings.workers, **listen)


if __name__ == "__main__":
    main()
