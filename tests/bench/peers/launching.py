"""What every peer's launcher does: reads its settings, finds a free port, says when it is ready."""

import argparse
import json
import os
import signal
import threading
import time
import urllib.request

POLL_S = 0.05


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


def say(**words: object) -> None:
    """Prints a line that `PeerProcess.hear` waits for."""
    print("\n" + json.dumps(words), flush=True)


def say_ready(port: int) -> None:
    """Says that the server listens."""
    say(event="ready", target=f"127.0.0.1:{port}")


def say_ready_when_healthy(port: int) -> None:
    """Does that, from a thread, as soon as the server is healthy."""

    def poll() -> None:
        while not is_healthy(port):
            time.sleep(POLL_S)
        say_ready(port)

    threading.Thread(target=poll, daemon=True).start()


def is_healthy(port: int) -> bool:
    """Whether GET /health answers 200."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return True
    except OSError:  # URLError is one
        return False
