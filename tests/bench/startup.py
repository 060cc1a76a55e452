"""Start to ready, and memory, of each service with MiniLM on OpenVINO.

Run: make bench
"""

import statistics
import time
from pathlib import Path

import psutil

from demo.model import find_minilm
from demo.processes import ServiceProcess
from neuronpipe.bundles.compiler import CompileRequest, compile_bundle

REPOSITORY = Path(".cache/demo-repository")
SERVICES = ("tokenizer", "neuron-executor", "postprocessor", "gateway", "all")
STARTS = 5


def main() -> None:
    """Starts each service a few times and prints the median."""
    if not (REPOSITORY / "minilm").is_dir():
        request = CompileRequest(source=str(find_minilm()), task="sentence_embedding", repository=REPOSITORY, name="minilm")
        compile_bundle(request, print)
    print(f"{'':16} {'ready s':>8} {'memory MB':>10}  torch")
    for service in SERVICES:
        ready_s, memory_mb, holds_torch = [], [], False
        for _ in range(STARTS):
            with ServiceProcess(service, "--repository", str(REPOSITORY)) as process:
                process.wait_until_ready()
                ready_s.append(time.monotonic() - process.began_s)
                running = psutil.Process(process.pid)
                memory_mb.append(running.memory_info().rss / 1e6)
                holds_torch |= any("/torch/" in one.path for one in running.memory_maps())
        print(f"{service:16} {statistics.median(ready_s):8.2f} {statistics.median(memory_mb):10.0f}  {'yes' if holds_torch else 'no'}")


if __name__ == "__main__":
    main()
