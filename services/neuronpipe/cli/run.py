"""`neuronpipe run`: from a model to a server on this machine, in one command."""

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from neuronpipe.cli.repository import folder
from neuronpipe.cli.terminal import option, report
from neuronpipe.core.errors import SetupError

HELP = "compile a model, unless it is compiled, and serve it on this machine over gRPC and HTTP"
EXTRA = "compile"

_CACHE = Path("~/.cache/neuronpipe/run")
_NEURONPIPE = (sys.executable, "-m", "neuronpipe")
# Lines of the service's log that say nothing new to who runs it.
_UNTOLD = ("computed", "stopped")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    option(parser, "source MODEL", "local folder of a model, or its id on the Hugging Face Hub")
    option(parser, "--task TASK", "as in `neuronpipe compile` (default: found in its configuration)", "")
    option(parser, "--dtype DTYPE", "as in `neuronpipe compile`, such as bfloat16 or int8", "")
    option(parser, "--backend BACKEND", "openvino (default) or torch", "openvino")
    option(parser, "--name NAME", "the model's name in requests (default: the last part of MODEL)", "")
    option(
        parser,
        "--repository DIR",
        f"where the compiled model is kept (default: a folder for this model in {_CACHE})",
        folder,
    )
    option(parser, "--listen HOST:PORT", "address of gRPC (default: %(default)s)", "127.0.0.1:50050")
    option(
        parser, "--http-listen HOST:PORT", "address of HTTP and of the console (default: %(default)s)", "127.0.0.1:8080"
    )


def run(options: argparse.Namespace) -> None:
    """Serves until Ctrl-C or SIGTERM. Raises SetupError."""
    from neuronpipe.bundles.repository import default_name, newest_bundle

    name = options.name or default_name(options.source)
    repository: Path = options.repository or _own_repository(options)
    compiling = ["compile", options.source, "--name", name, "--backend", options.backend, "--if-missing"]
    compiling += ["--task", options.task, "--dtype", options.dtype, "--repository", str(repository)]
    # In a process of its own: what compiling needs (PyTorch, transformers) stays out of the one that serves.
    if code := _started(*compiling, stdout=subprocess.DEVNULL).wait():
        sys.exit(code)
    bundle = newest_bundle(repository, name, options.backend)
    if bundle is None:
        raise SetupError(f"--repository {repository}: has no model {name!r} for {options.backend}")
    serving = ["--repository", str(repository), "--listen", options.listen, "--http-listen", options.http_listen]
    with _service(*serving) as service:
        addresses: dict[str, str] = {}
        for line in service.stderr or ():
            entry = _read(line)
            event = entry.get("event", "")
            if event.startswith("listening"):
                addresses[event] = entry["address"]
            elif event == "ready":
                _tell(name, bundle.spec.task, addresses["listening"], addresses["listening for HTTP"])
            elif event == "draining":
                report("stopping: finishing the requests in flight; press Ctrl-C again to end at once")
            elif event not in _UNTOLD:
                report(line.rstrip())
    if service.returncode:
        sys.exit(service.returncode)


def _own_repository(options: argparse.Namespace) -> Path:
    """A folder for this model and these options alone; another when the model's files change."""
    source = Path(options.source)
    files = sorted(file for file in source.rglob("*") if file.is_file()) if source.is_dir() else []
    seen = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    known = (str(source.resolve()) if files else options.source, options.task, options.dtype, options.backend, seen)
    return _CACHE.expanduser() / hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]


def _started(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    """A command of ours, which ends when this process does, however that happens."""
    from neuronpipe.platform.process.life import end_with

    end = partial(end_with, os.getpid(), signal.SIGTERM)
    return subprocess.Popen([*_NEURONPIPE, *arguments], text=True, preexec_fn=end, **options)  # noqa: S603


@contextmanager
def _service(*settings: str) -> Iterator[subprocess.Popen[str]]:
    """`neuronpipe serve all`, which a signal to this process ends: at the first one it drains, at the second one at
    once.
    """
    service = _started("serve", "all", *settings, stderr=subprocess.PIPE, start_new_session=True)
    signals = [signal.SIGTERM, signal.SIGKILL]

    def end(*_: object) -> None:
        service.send_signal(signals.pop(0) if len(signals) > 1 else signals[0])

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield service
        service.wait()
    finally:
        service.kill()
        for number, handler in before.items():
            signal.signal(number, handler)


def _read(line: str) -> dict[str, str]:
    """A line of the log; empty for another line, such as one of a library."""
    try:
        entry = json.loads(line)
    except ValueError:
        return {}
    return entry if isinstance(entry, dict) else {}


def _tell(name: str, task: str, grpc: str, http: str) -> None:
    """Where the model is served, and a first request."""
    report(f"\n{name} ({task.replace('_', '-')}) is served; Ctrl-C ends it.\n")
    report(f"  gRPC     {grpc}\n  HTTP     http://{http}\n  console  http://{http}/\n")
    report(f"Try it:\n\n  {first_request(name, task, http)}\n")


def first_request(name: str, task: str, http: str) -> str:
    """A call by curl: with the task's sample, in the form of the protocol that has the task."""
    from neuronpipe.core.task_inputs import SAMPLES
    from neuronpipe.doors.http.huggingface_tasks import CONVERTERS

    sample = SAMPLES[task]
    if task == "text_generation":
        path, body = "/v1/completions", {"model": name, "prompt": sample["prompt"], "max_tokens": 40}
    else:
        path, body = f"/models/{name}", {"inputs": None}
        for ours, theirs in CONVERTERS[task].fields.items():
            if ours in sample:
                *outer, last = theirs.replace("…", "").split(".")
                place: dict[str, object] = body
                for key in outer:
                    inner = place[key] = place.get(key) or {}
                    assert isinstance(inner, dict)  # noqa: S101 (the fields of a body are no texts)
                    place = inner
                place[last] = sample[ours]
    data = json.dumps(body, ensure_ascii=False).replace("'", "'\\''")
    return f"curl http://{http}{path} -H 'content-type: application/json' -d '{data}'"
