"""What every peer's launcher does: reads its settings, finds a free port, says when it is ready."""

import argparse
import json
import os
import signal
import threading
import time
import urllib.error
import urllib.request

_POLL_S = 0.05


def read_settings(**defaults: int) -> argparse.Namespace:
    """The folder of the model and the peer's settings: whole numbers, each an option with its default."""
    parser = argparse.ArgumentParser()
    parser.add_argument("source")
    for name, default in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    return parser.parse_args()


def end_with_parent() -> None:
    """Sends this process SIGTERM when whoever started it has gone, whichever way: its end of standard input is then
    closed.
    """

    def wait() -> None:
        while os.read(0, 1024):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


def say_ready(port: int) -> None:
    """Prints the line that `running` waits for."""
    print("\n" + json.dumps({"event": "ready", "target": f"127.0.0.1:{port}"}), flush=True)


def say_ready_when_healthy(port: int) -> None:
    """Does that, from a thread, as soon as GET /health answers 200."""

    def poll() -> None:
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                    return say_ready(port)
            except (urllib.error.URLError, OSError):
                time.sleep(_POLL_S)

    threading.Thread(target=poll, daemon=True).start()
