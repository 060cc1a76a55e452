"""The demo: compiles MiniLM and a tiny model that writes, serves them as four processes and as one, finds similar
sentences, calls them by curl, lets one write, and shows where the time goes.

Run: make demo
"""

import argparse
import itertools
import json
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from textwrap import indent

import numpy as np

from demo.model import find_minilm, is_compiled
from demo.processes import ServiceProcess, four_processes
from neuronpipe import cli
from neuronpipe.api.v1.inference_pb2 import InferRequest, InferResponse
from neuronpipe.api.v1.tasks_pb2 import SentenceEmbeddingInput, TaskInput
from neuronpipe.client import Client

MODEL, WRITER = "minilm", "writer"
PROMPT = "A batch is"
NEW_TOKENS = 60
SENTENCES = [
    "The cat sleeps on the warm windowsill.",
    "A kitten is napping in the sun by the window.",
    "Interest rates were raised by the central bank.",
    "The bank increased the cost of borrowing money.",
    "How do I reset my password?",
    "I forgot my login and cannot get into my account.",
    "The train to Hamburg leaves at nine.",
    "Our flight was delayed by heavy snow.",
    "She plays the violin in an orchestra.",
    "He has been a cellist with the symphony for years.",
]
WARM_REQUESTS = 200
# Every request is traced here, and the last ones are kept.
_TRACED = ("--kept-traces", "100")
_HTTP = ("--http-listen", "127.0.0.1:0")
_SAMPLED = {"OTEL_TRACES_SAMPLER": "parentbased_always_on"}


def main() -> None:
    """Runs the demo; whatever happens, every process that it started is ended."""
    parser = argparse.ArgumentParser(description="Compile and serve MiniLM, and show where the time of a request goes.")
    parser.add_argument(
        "--repository", type=Path, default=Path(".cache/demo-repository"), help="where the compiled model is kept"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        _run(options.repository)
    except KeyboardInterrupt:
        print("\nInterrupted; the services are stopped.")
        sys.exit(130)


def _report(lines: str) -> None:
    print(indent(lines, "  "), flush=True)


def _run(repository: Path) -> None:
    if not (is_compiled(repository, MODEL) and is_compiled(repository, WRITER)):
        _compile(repository)
    with ExitStack() as stack:
        print("\nStarting the four services, and the same pipeline in one process:")
        processes = stack.enter_context(four_processes(repository, *_TRACED, environment=_SAMPLED))
        single = stack.enter_context(
            ServiceProcess("all", "--repository", str(repository), *_TRACED, *_HTTP, environment=_SAMPLED)
        ).wait_until_ready()
        for process in (*processes.values(), single):
            print(f"  {process.service:16} {process.target:16} pid {process.pid}", flush=True)
        clients = {
            "four processes": stack.enter_context(Client(processes["gateway"].target)),
            "one process": stack.enter_context(Client(single.target)),
        }
        cold = {name: [_embed(client, SENTENCES[0])] for name, client in clients.items()}
        _print_similar_pairs(clients["four processes"])
        _print_curl(str(single.wait_for("listening for HTTP")["address"]))
        warm = {
            name: [_embed(client, sentence) for sentence in itertools.islice(itertools.cycle(SENTENCES), WARM_REQUESTS)]
            for name, client in clients.items()
        }
        _print_latency(cold, warm)
        print(f"\nThe tiny model continues {PROMPT!r}, and its text comes as it is written:\n", flush=True)
        writing = ["--model", WRITER, "--prompt", PROMPT, "--max-new-tokens", str(NEW_TOKENS)]
        cli.main(["generate", "--target", processes["gateway"].target, *writing])
        print("\nOne request through the four processes, as `neuronpipe trace` draws it:\n", flush=True)
        input = json.dumps({"sentence_embedding": {"text": SENTENCES[0]}})
        cli.main(["trace", "--target", processes["gateway"].target, "--model", MODEL, "--json", input])


def _compile(repository: Path) -> None:
    """Makes what is missing. Only this needs PyTorch and transformers, whose imports take seconds."""
    from demo.writer import make_writer
    from neuronpipe.compiler import CompileRequest, compile_bundle

    if not is_compiled(repository, MODEL):
        print("Compiling sentence-transformers/all-MiniLM-L6-v2 for OpenVINO:")
        request = CompileRequest(
            source=str(find_minilm()), task="sentence_embedding", repository=repository, name=MODEL
        )
        compile_bundle(request, _report)
    if not is_compiled(repository, WRITER):
        print("\nTraining a tiny Llama on demo/writer.txt for some seconds, and compiling it:", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            source = str(make_writer(Path(folder)))
            request = CompileRequest(source=source, task="text_generation", repository=repository, name=WRITER)
            compile_bundle(request, _report)


def _embed(client: Client, text: str) -> InferResponse:
    return client.infer(
        InferRequest(model=MODEL, input=TaskInput(sentence_embedding=SentenceEmbeddingInput(text=text)))
    )


def _print_similar_pairs(client: Client) -> None:
    vectors = np.array([client.embed(MODEL, sentence) for sentence in SENTENCES])
    similarity = vectors @ vectors.T
    pairs = sorted(itertools.combinations(range(len(SENTENCES)), 2), key=lambda pair: similarity[pair], reverse=True)
    print(f"\nThe most similar of {len(pairs)} pairs of sentences, by cosine:")
    for first, second in pairs[:5]:
        print(f"  {similarity[first, second]:.3f}  {SENTENCES[first]}  |  {SENTENCES[second]}")


def _print_curl(address: str) -> None:
    first, *others = SENTENCES[:3]
    body = json.dumps({"inputs": {"source_sentence": first, "sentences": others}})
    command = ["curl", "--silent", "--fail-with-body", f"http://{address}/similarity"]
    command += ["-H", "Content-Type: application/json", "-d", body]
    print(f"\nThe same over HTTP, to the one process:\n  $ {shlex.join(command)}", flush=True)
    if shutil.which("curl"):
        print(f"  {subprocess.run(command, check=True, capture_output=True, text=True).stdout}")
    else:
        print("  (curl is not installed here)")


def _print_latency(cold: Mapping[str, Sequence[InferResponse]], warm: Mapping[str, Sequence[InferResponse]]) -> None:
    print(
        "\nWhere the time of one request goes, in ms (cold: the first request; warm: the median one of "
        f"{WARM_REQUESTS}):"
    )
    print(
        f"  {'':22} {'total':>8} = {'pre-process':>11} + {'predict':>8} + {'post-process':>12} + {'rest':>6}    "
        f"{'queue':>6} {'compute':>8}"
    )
    for name in cold:
        for state, responses in (("cold", cold[name]), ("warm", warm[name])):
            timings = sorted((response.timings for response in responses), key=lambda times: times.total_ns)[
                len(responses) // 2
            ]
            stages_ns = timings.preprocess_ns + timings.predict_ns + timings.postprocess_ns
            total, preprocess, predict, postprocess, rest, queue, compute = (
                duration_ns / 1e6
                for duration_ns in (
                    timings.total_ns,
                    timings.preprocess_ns,
                    timings.predict_ns,
                    timings.postprocess_ns,
                    timings.total_ns - stages_ns,
                    timings.predict_queue_ns,
                    timings.predict_compute_ns,
                )
            )
            print(
                f"  {name:16} {state:5} {total:8.2f} = {preprocess:11.2f} + {predict:8.2f} + {postprocess:12.2f} "
                f"+ {rest:6.2f}"
                f"    {queue:6.2f} {compute:8.2f}"
            )
    print("  queue and compute are the executor's own measurements, inside predict.")


if __name__ == "__main__":
    main()
