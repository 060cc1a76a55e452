"""llama.cpp's server with a model that embeds: POST /v1/embeddings {"input"}."""

import signal
from pathlib import Path

from tests.bench.peers.launching import end_with_parent, read_settings, say_ready
from tests.bench.peers.llama_cpp import running_llama_server

# Tokens of a text at most.
_SLOT_TOKENS = 256


def main() -> None:
    """Serves until SIGTERM. The folder's name is the dtype of the weights, its `source` the model."""
    settings = read_settings(threads=2, slots=8, batch_tokens=2048)
    end_with_parent()
    signals = {signal.SIGTERM, signal.SIGINT}
    folder = Path(settings.source)
    threads, batch = str(settings.threads), str(settings.batch_tokens)
    computing = ("--threads", threads, "--threads-batch", threads, "--batch-size", batch, "--ubatch-size", batch)
    slots = ("--parallel", str(settings.slots), "--ctx-size", str(settings.slots * _SLOT_TOKENS))
    model = ("--embeddings", "--pooling", "mean")
    with running_llama_server(folder.parent / "source", folder.name, *model, *computing, *slots) as port:
        # Later than the server's start, which would inherit it.
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        say_ready(port)
        signal.sigwait(signals)


if __name__ == "__main__":
    main()
