"""stages/neuron_executor/runtimes/openvino.py: the one engine of a process."""

import subprocess
import sys

_THREADS_BEGIN = """
import sys, threading
from neuronpipe.stages.neuron_executor.runtimes.openvino import engine, openvino

engine()
sys.setswitchinterval(1e-6)
together = threading.Barrier(6)

def begin():
    together.wait()
    openvino.Type.f32.to_dtype()

threads = [threading.Thread(target=begin) for _ in range(6)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_threads_whose_first_batches_come_at_once_do_not_wait_for_each_other_for_ever() -> None:
    # Without the engine's care six in ten processes hang.
    for _ in range(4):
        subprocess.run([sys.executable, "-c", _THREADS_BEGIN], check=True, timeout=60)
