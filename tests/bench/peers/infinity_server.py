"""infinity with its torch engine, or with the graph that its folder holds."""

import sys
from pathlib import Path

from infinity_emb import cli

from tests.bench.peers.classifier import GRAPH_FILE
from tests.bench.peers.launching import end_with_parent, free_port, read_settings, say_ready_when_healthy


def main() -> None:
    """Serves POST /classify until SIGTERM."""
    # Not ranked: single runs on 2 shared cores (2026-11-21): 8 callers got 45 to 55 texts/s with two threads, 44 with
    # one. One worker.
    settings = read_settings(threads=2, max_batch_size=32, compile=0)
    end_with_parent()
    if (Path(settings.source) / GRAPH_FILE).is_file():
        from tests.bench.peers.infinity_graph import install

        install(settings.threads)
    else:
        import torch

        torch.set_num_threads(settings.threads)
    port = free_port()
    say_ready_when_healthy(port)
    served = ("--model-id", settings.source, "--served-model-name", Path(settings.source).name)
    engine = (
        "--engine",
        "torch",
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--batch-size",
        str(settings.max_batch_size),
    )
    compiled = ("--compile" if settings.compile else "--no-compile",)
    listen = ("--host", "127.0.0.1", "--port", str(port), "--log-level", "warning")
    sys.argv = ["infinity_emb", "v2", *served, *engine, *compiled, "--no-bettertransformer", *listen]
    cli.cli()


if __name__ == "__main__":
    main()
