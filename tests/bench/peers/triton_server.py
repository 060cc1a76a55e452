"""Triton with its Python back end and dynamic batching: the binary that nvidia-pytriton ships, without pytriton's proxy
before it.

pytriton would run the model in a process of its own behind Triton's Python back end: one hop more. Its own start also
fails on Python 3.11.7. The back end loads the model itself here, as in Triton's container.
"""

import os
import platform
import shutil
import signal
import site
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import pytriton
import tritonclient.grpc

import tests
from tests.bench.peers.launching import end_with_parent, read_settings, say_ready
from tests.servers.ports import free_port

_MODEL = "classifier"
_POLL_S = 0.05
_CONFIG = """
backend: "python"
max_batch_size: {max_batch_size}
input [ {{ name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] }} ]
output [
  {{ name: "LABEL" data_type: TYPE_STRING dims: [ 1 ] }},
  {{ name: "SCORE" data_type: TYPE_FP32 dims: [ 1 ] }}
]
dynamic_batching {{ max_queue_delay_microseconds: {queue_delay_us} }}
instance_group [ {{ kind: KIND_CPU count: {workers} }} ]
parameters {{ key: "source" value: {{ string_value: "{source}" }} }}
parameters {{ key: "threads" value: {{ string_value: "{threads}" }} }}
"""


def main() -> None:
    """Serves until SIGTERM."""
    # Chosen from single runs of 1.5 to 3 s on 2 shared cores (2026-11-21), too noisy to rank close settings: 8 callers
    # got 55 to 88 texts/s from two instances of one thread, 7 to 92 from one of two; one caller 43 to 49 against 7 to
    # 64. The queue delay was not ranked. Two threads of a batch wait for each other, and fall to a fifth or less where
    # something else takes a core.
    settings = read_settings(threads=1, workers=2, max_batch_size=32, queue_delay_us=0)
    end_with_parent()
    with tempfile.TemporaryDirectory(prefix="triton-") as folder:
        model = Path(folder) / "models" / _MODEL
        (model / "1").mkdir(parents=True)
        (model / "config.pbtxt").write_text(_CONFIG.format(**vars(settings)))
        shutil.copy(Path(__file__).with_name("triton_model.py"), model / "1/model.py")
        # The embedded Python takes no PYTHONPATH; it looks in the working folder first and in the model's folder last.
        (model / "1/tests").symlink_to(Path(tests.__file__).parent)
        port = free_port()
        server = subprocess.Popen(_command(Path(folder), port), env=_environment(), cwd=site.getsitepackages()[0])
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: server.terminate())
        with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{port}") as client:
            while server.poll() is None and not _is_ready(client):
                time.sleep(_POLL_S)
        if server.poll() is None:
            say_ready(port)
        sys.exit(server.wait())


def _command(folder: Path, port: int) -> list[str]:
    shipped = Path(pytriton.__file__).parent / "tritonserver"
    backends = Path(shutil.copytree(shipped / "backends", folder / "backends"))
    stub = (
        shipped / "python_backend_stubs" / ".".join(platform.python_version_tuple()[:2]) / "triton_python_backend_stub"
    )
    shutil.copy(stub, backends / "python")
    listen = ["--grpc-address=127.0.0.1", f"--grpc-port={port}", "--allow-http=false", "--allow-metrics=false"]
    models = [
        f"--model-repository={folder / 'models'}",
        f"--backend-directory={backends}",
        "--disable-auto-complete-config",
    ]
    return [str(shipped / "bin/tritonserver"), *models, *listen, "--exit-timeout-secs=5"]


def _environment() -> dict[str, str]:
    """The back end embeds Python: it must find this interpreter's library and modules,
    and the libraries of the wheel."""
    libraries = os.pathsep.join(
        [sysconfig.get_config_var("LIBDIR"), str(Path(pytriton.__file__).parents[1] / "nvidia_pytriton.libs")]
    )
    return {**os.environ, "PYTHONHOME": sys.base_prefix, "LD_LIBRARY_PATH": libraries}


def _is_ready(client: "tritonclient.grpc.InferenceServerClient") -> bool:
    try:
        return bool(client.is_model_ready(_MODEL))
    except tritonclient.grpc.InferenceServerException:
        return False


if __name__ == "__main__":
    main()
