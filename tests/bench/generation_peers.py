"""Other engines that generate texts, each in a process and an environment of its own, on the same weights."""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.bench.generation_alone import BART, FIRST_WORD, LLAMA, VOCABULARY
from tests.bench.peers.environments import environment_python
from tests.bench.peers.running import PeerProcess, PeerUnavailable

# What transformers generates for a prompt, by model; written last of all that generation_models.py makes.
EXPECTED_FILE = "expected.json"
# vLLM took three minutes on a machine with other work.
_START_LIMIT_S = 400.0
_TURN_LIMIT_S = 200.0
GENAI, CTRANSLATE2 = "openvino-genai", "ctranslate2"


@dataclass(frozen=True)
class _Peer:
    """`name`: of its script and its environment. `program`: what must be on the PATH; `source`: how to get it."""

    name: str
    model: str
    program: str = ""
    source: str = ""


_PEERS = (
    _Peer(GENAI, LLAMA),
    _Peer("vllm", LLAMA),
    _Peer(
        "llama-cpp",
        LLAMA,
        program="llama-server",
        source="in ggml-org/llama.cpp: cmake -B build && cmake --build build --target llama-server",
    ),
    _Peer(CTRANSLATE2, BART),
)
GENERATION_PEERS = tuple(peer.name for peer in _PEERS)


class GenerationPeer:
    """A peer that has generated the right tokens. It is stopped (SIGSTOP) while it is not its turn."""

    def __init__(self, name: str, model: str, process: PeerProcess, unavailable: dict[str, str]) -> None:
        self.name, self.model = name, model
        self._process, self._unavailable = process, unavailable
        self._process.pause()

    def measure(self, model: str, prompt_tokens: int, new_tokens: int, callers: int, seconds: float) -> float | None:
        """New tokens a second of batches of as many prompts as callers; None once it has ended, whose reason is
        noted.
        """
        if self.name in self._unavailable:
            return None
        order = {"prompt_tokens": prompt_tokens, "new_tokens": new_tokens, "callers": callers, "seconds": seconds}
        self._process.resume()
        try:
            self._process.tell({"vocabulary": [FIRST_WORD, VOCABULARY], **order})
            return float(self._process.wait_for("measured", seconds + _TURN_LIMIT_S)["tokens_per_s"])
        except PeerUnavailable as error:
            self._unavailable[self.name] = error.reason
            return None
        finally:
            self._process.pause()


@contextmanager
def running_generation_peers(folder: Path, unavailable: dict[str, str]) -> Iterator[Sequence[GenerationPeer]]:
    """Those that can be had, ready; ended with the block. Notes the reasons of the others in `unavailable`."""
    with ExitStack() as stack:
        logs = Path(stack.enter_context(TemporaryDirectory(prefix="generation-peers-")))
        running = []
        for peer in _PEERS:
            try:
                process = _start(stack, peer, folder, logs / f"{peer.name}.log")
                running.append(GenerationPeer(peer.name, peer.model, process, unavailable))
            except PeerUnavailable as error:
                unavailable[peer.name] = error.reason
        yield running


def _start(stack: ExitStack, peer: _Peer, folder: Path, log: Path) -> PeerProcess:
    if peer.program and not shutil.which(peer.program):
        raise PeerUnavailable(peer.name, f"{peer.program} is not on the PATH; {peer.source}")
    try:
        python = environment_python(peer.name)
    except RuntimeError as error:
        raise PeerUnavailable(peer.name, f"cannot be installed: {error}") from error
    script = f"tests.bench.peers.{peer.name.replace('-', '_')}_alone"
    command = [str(python), "-m", script, str(folder), peer.model]
    with ExitStack() as own:
        process = own.enter_context(PeerProcess(peer.name, command, log))
        process.wait_for("ready", _START_LIMIT_S)
        expected = json.loads((folder / EXPECTED_FILE).read_text())[peer.model]
        process.tell({"prompt": expected["prompt"], "new_tokens": len(expected["token_ids"])})
        generated = process.wait_for("generated", _TURN_LIMIT_S)["token_ids"]
        if generated != expected["token_ids"]:
            raise PeerUnavailable(peer.name, f"generates {generated}, and transformers {expected['token_ids']}")
        stack.push(own.pop_all())
    return process
