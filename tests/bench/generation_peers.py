"""Other engines that generate texts, each in a process and an environment of its own, on the same weights."""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.bench.generation_alone import BART, FIRST_WORD, LLAMA, VOCABULARY
from tests.bench.peers.running import PeerProcess, PeerUnavailable, peer_python

# What transformers generates for a prompt, by model; written last of all that generation_models.py makes.
EXPECTED_FILE = "expected.json"
# vLLM took three minutes on a machine with other work.
_START_LIMIT_S = 400.0
_TURN_LIMIT_S = 200.0
GENAI, CTRANSLATE2 = "openvino-genai", "ctranslate2"
# The model of each; its name is that of its script and its environment.
GENERATION_PEERS = {GENAI: LLAMA, "vllm": LLAMA, CTRANSLATE2: BART}


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
            return float(self._process.hear("measured", seconds + _TURN_LIMIT_S)["tokens_per_s"])
        except PeerUnavailable as error:
            self._unavailable[self.name] = error.reason
            return None
        finally:
            self._process.pause()


@contextmanager
def running_generation_peers(folder: Path, unavailable: dict[str, str]) -> Iterator[Sequence[GenerationPeer]]:
    """Those that can be had, ready; ended with the block. Notes the reasons of the others in `unavailable`."""
    with ExitStack() as stack:
        running = []
        for name, model in GENERATION_PEERS.items():
            try:
                process = _start(stack, name, model, folder)
                running.append(GenerationPeer(name, model, process, unavailable))
            except PeerUnavailable as error:
                unavailable[name] = error.reason
        yield running


def _start(stack: ExitStack, name: str, model: str, folder: Path) -> PeerProcess:
    script = f"tests.bench.peers.{name.replace('-', '_')}_alone"
    with ExitStack() as own:
        process = own.enter_context(PeerProcess(name, [peer_python(name), "-m", script, str(folder), model]))
        process.hear("ready", _START_LIMIT_S)
        expected = json.loads((folder / EXPECTED_FILE).read_text())[model]
        process.tell({"prompt": expected["prompt"], "new_tokens": len(expected["token_ids"])})
        generated = process.hear("generated", _TURN_LIMIT_S)["token_ids"]
        if generated != expected["token_ids"]:
            raise PeerUnavailable(name, f"generates {generated}, and transformers {expected['token_ids']}")
        stack.push(own.pop_all())
    return process
