"""text-embeddings-inference, as its program text-embeddings-router serves a classifier."""

import signal
import subprocess
import sys

from tests.bench.peers.launching import end_with_parent, free_port, read_settings, say_ready_when_healthy


def main() -> None:
    """Serves POST /predict until SIGTERM."""
    # Not ranked: it could not be had where the others were measured.
    settings = read_settings(max_client_batch_size=32, tokenization_workers=2)
    end_with_parent()
    port = free_port()
    say_ready_when_healthy(port)
    listen = ("--hostname", "127.0.0.1", "--port", str(port))
    model = ("--model-id", settings.source, "--dtype", "float32", "--auto-truncate")
    sizes = (
        *("--max-client-batch-size", str(settings.max_client_batch_size)),
        *("--tokenization-workers", str(settings.tokenization_workers)),
    )
    with subprocess.Popen(["text-embeddings-router", *model, *listen, *sizes]) as process:
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        sys.exit(process.wait())


if __name__ == "__main__":
    main()
