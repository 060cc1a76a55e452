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
from typing import TYPE_CHECKING, Any

from neuronpipe.cli.repository import folder
from neuronpipe.cli.terminal import option, report
from neuronpipe.core.errors import SetupError

if TYPE_CHECKING:
    from neuronpipe.serve.settings import AllSettings

HELP = "compile a model, unless it is compiled, and serve it on this machine over gRPC and HTTP"
EXTRA = "compile"

_CACHE = Path("~/.cache/neuronpipe/run")
_NEURONPIPE = (sys.executable, "-m", "neuronpipe")
# Events of the service's log that are not shown, because they do not help the user.
_NOT_SHOWN = ("computed", "stopped")
# Settings of the addresses that events name.
_ADDRESSES = {"listening": "listen", "listening for HTTP": "http_listen"}


def add_options(parser: argparse.ArgumentParser) -> None:
    option(parser, "source MODEL", "local folder of a model, or its id on the Hugging Face Hub")
    option(parser, "--task TASK", "task, see `neuronpipe compile` (default: found in its configuration)", "")
    option(parser, "--dtype DTYPE", "dtype, such as bfloat16 or int8; see `neuronpipe compile`", "")
    option(parser, "--backend BACKEND", "openvino (default) or torch", "openvino")
    option(parser, "--name NAME", "the model's name in requests (default: the last part of MODEL)", "")
    option(parser, "--repository DIR", f"folder of the compiled model (default: its own in {_CACHE})", folder)
    option(parser, "--listen HOST:PORT", "address of gRPC (default: %(default)s)", "127.0.0.1:50050")
    option(parser, "--http-listen HOST:PORT", "address of HTTP and console (default: %(default)s)", "127.0.0.1:8080")


def run(options: argparse.Namespace) -> None:
    """Serves until Ctrl-C or SIGTERM. Raises SetupError."""
    from neuronpipe.bundles.writing import default_name, newest_bundle
    from neuronpipe.core.settings import read_settings
    from neuronpipe.serve.settings import AllSettings

    name = options.name or default_name(options.source)
    repository: Path = options.repository or _own_repository(options)
    # Before the model is compiled, which takes minutes: a wrong setting ends the command at once.
    addresses = {"listen": options.listen, "http_listen": options.http_listen}
    settings = read_settings(AllSettings, {"repository": str(repository), **addresses})
    compiling = ["compile", options.source, "--name", name, "--backend", options.backend, "--if-missing"]
    compiling += ["--task", options.task, "--dtype", options.dtype, "--repository", str(repository)]
    # In a process of its own: the compiler's libraries (PyTorch, transformers) stay out of the serving process.
    if code := _started(*compiling, stdout=subprocess.DEVNULL).wait():
        sys.exit(code)
    bundle = newest_bundle(repository, name, options.backend)
    if bundle is None:
        raise SetupError(f"--repository {repository}: has no model {name!r} for {options.backend}")
    serving = ["--repository", str(repository), "--listen", options.listen, "--http-listen", options.http_listen]
    serving += ["--kept-traces", "100"]
    with _service(*serving) as service:
        for line in service.stderr or ():
            entry = _read(line)
            event = entry.get("event", "")
            if event in _ADDRESSES:
                addresses[_ADDRESSES[event]] = entry["address"]
            elif event == "ready":
                _tell(name, bundle.spec.task, settings, **addresses)
            elif event == "draining":
                report("stopping: finishing the requests in flight; press Ctrl-C again to end at once")
            elif event not in _NOT_SHOWN:
                report(line.rstrip())
    if service.returncode:
        sys.exit(service.returncode)


def _own_repository(options: argparse.Namespace) -> Path:
    """Returns a folder for this model and these options alone; another folder when the model's files change."""
    source = Path(options.source)
    files = sorted(file for file in source.rglob("*") if file.is_file()) if source.is_dir() else []
    seen = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    key = (str(source.resolve()) if files else options.source, options.task, options.dtype, options.backend, seen)
    return _CACHE.expanduser() / hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]


def _started(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    """Starts a neuronpipe command, which ends when this process does, for any reason."""
    from neuronpipe.platform.process.life import end_with

    end = partial(end_with, os.getpid(), signal.SIGTERM)
    return subprocess.Popen([*_NEURONPIPE, *arguments], text=True, preexec_fn=end, **options)  # noqa: S603


@contextmanager
def _service(*settings: str) -> Iterator[subprocess.Popen[str]]:
    """Runs `neuronpipe serve all`. The first signal to this process drains it, and the second ends it at once."""
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
    """Parses a line of the log; empty for another line, such as a library's."""
    try:
        entry = json.loads(line)
    except ValueError:
        return {}
    return entry if isinstance(entry, dict) else {}


def _tell(name: str, task: str, settings: "AllSettings", listen: str, http_listen: str) -> None:
    scheme = "https" if settings.tls.tls_certificate else "http"
    url = f"{scheme}://{http_listen}".replace("//0.0.0.0:", "//127.0.0.1:")  # an address at which this machine calls
    http, callers = settings.gateway.http, settings.gateway.callers
    off = "off" if http.console == "off" else "off (--http-listen is not on loopback; NEURONPIPE_ALL_CONSOLE=on)"
    report(f"\n{name} ({task.replace('_', '-')}) is served; Ctrl-C ends it.\n")
    report(f"  gRPC     {listen}\n  HTTP     {url}")
    report(f"  console  {f'{url}/' if http.has_console else off}\n\nTry it:\n")
    if callers.api_keys:
        report(f"  neuronpipe key create --api-keys {callers.api_keys} --tenant TENANT  # then set NEURONPIPE_API_KEY")
    report(f"  {first_request(name, task, url, has_key=callers.has_authentication)}\n")


def first_request(name: str, task: str, url: str, *, has_key: bool = False) -> str:
    """Returns a call by curl: with the task's sample, in the form of the protocol that has the task.

    `has_key`: the call sends the key or token in NEURONPIPE_API_KEY.
    """
    from neuronpipe.core.task_inputs import SAMPLES
    from neuronpipe.doors.http.huggingface_tasks import CONVERTERS

    sample = SAMPLES[task]
    if task == "text_generation":
        path, body = "/v1/completions", {"model": name, "prompt": sample["prompt"], "max_tokens": 40}
    else:
        path, body = f"/models/{name}", {"inputs": None}
        for our_field, their_field in CONVERTERS[task].fields.items():
            if our_field in sample:
                *outer, last = their_field.replace("…", "").split(".")
                place: Any = body
                for key in outer:
                    place[key] = place = place.get(key) or {}
                place[last] = sample[our_field]
        if sample.get("is_query"):
            body["prompt_name"] = "query"
    data = json.dumps(body, ensure_ascii=False).replace("'", "'\\''")
    key = ' -H "authorization: Bearer $NEURONPIPE_API_KEY"' if has_key else ""
    return f"curl {url}{path}{key} -H 'content-type: application/json' -d '{data}'"
