"""Runs cases with curl, one call after the other, each over a connection of its own."""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.interop.clients.lines import CallRecord, serve_lines
from tests.interop.clients.wire import body_of, fields_of, read_response

_LIMIT_S = "60"


def _tls_options(case: dict[str, Any]) -> list[str]:
    tls = case["tls"]
    if not tls:
        return ["--http2-prior-knowledge"]
    shown = ["--cert", tls["certificate"], "--key", tls["key"]] if "key" in tls else []
    return ["--http2", "--cacert", tls["ca"], *shown]


def _call_once(case: dict[str, Any], call: dict[str, Any], folder: Path) -> CallRecord:
    record = CallRecord()
    head, body, sent = folder / "head", folder / "body", folder / "sent"
    sent.write_bytes(body_of(call))
    body.unlink(missing_ok=True)
    fields = [word for key, value in fields_of(call) for word in ("-H", f"{key}: {value}" if value else f"{key};")]
    options = ["-sS", "--max-time", _LIMIT_S, "-D", str(head), "-o", str(body), "--data-binary", f"@{sent}"]
    url = f"{'https' if case['tls'] else 'http'}://{case['target']}{call['path']}"
    done = subprocess.run(
        ["curl", *_tls_options(case), *options, "-H", "Expect:", *fields, url],
        check=False,
        capture_output=True,
        text=True,
    )
    lines = head.read_text().splitlines() if head.exists() else []
    status = lines[0].split()[1] if lines else f"none, {done.stderr.strip()}"
    pairs = [line.partition(": ") for line in lines[1:] if ": " in line]
    received = body.read_bytes() if body.exists() else b""
    return read_response(record, status, [(key, value) for key, _, value in pairs], received)


def _run(case: dict[str, Any]) -> Sequence[Sequence[CallRecord]]:
    with TemporaryDirectory() as folder:
        return [[_call_once(case, call, Path(folder)) for _ in range(call["repeat"])] for call in case["calls"]]


if __name__ == "__main__":
    serve_lines(_run)
