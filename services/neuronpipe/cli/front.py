"""A front process of `neuronpipe serve all --front-processes N`, which alone starts it.

Started as `python -m neuronpipe.cli.front NUMBER PARENT_PID`, with a socket to the parent as its standard input.
"""

import json
import os
import signal
import socket
import sys

from neuronpipe.cli.serve import run_service
from neuronpipe.core.errors import SetupError
from neuronpipe.core.logs import start_logging
from neuronpipe.platform.process.life import end_with
from neuronpipe.serve.front import run_front
from neuronpipe.serve.settings import AllSettings


def main() -> None:
    """Serves until SIGTERM. Exit codes: see cli/serve.py."""
    number, parent_pid = map(int, sys.argv[1:])
    end_with(parent_pid, signal.SIGKILL)  # a front process must not outlive its parent
    parent = socket.socket(fileno=sys.stdin.fileno())
    try:
        start_logging(f"all, front {number}", os.environ.get("NEURONPIPE_LOG", ""), is_front=True)
        with parent.makefile("rb") as file:  # the parent sends no other message before an answer
            settings = AllSettings.of(**json.loads(file.readline()))
        # The parent exports the metrics of all processes.
        variables = {**os.environ, "OTEL_METRICS_EXPORTER": "none"}
        run_service("all", settings, lambda telemetry, tls: run_front(settings, telemetry, tls, parent), variables)
    except SetupError as error:
        print(f"neuronpipe: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
