"""Other engines that generate texts, each in a process and an environment of its own, on the same weights."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeAlias

from tests.bench.generation_alone import BART, FIRST_WORD, LLAMA, VOCABULARY
from tests.bench.peers.running import PeerProcess, PeerUnavailable, peer_python

# What transformers generates for a prompt, by model; written last of all that generation_models.py makes.
EXPECTED_FILE = "expected.json"
# vLLM took three minutes on a machine with other work.
_START_LIMIT_S = 400.0
_TURN_LIMIT_S = 200.0
GENAI, CTRANSLATE2, LLAMA_CPP = "openvino-genai", "ctranslate2", "llama-cpp"
# The model of each; its name is that of its script and its environment.
GENERATION_PEERS = {GENAI: LLAMA, "vllm": LLAMA, LLAMA_CPP: LLAMA, CTRANSLATE2: BART}

# The fault of the tokens that a peer generated after a prompt; empty where there is none.
FindFault: TypeAlias = Callable[[Sequence[int]], str]


class GenerationPeer:
    """A peer that has generated the right tokens. It is stopped (SIGSTOP) while it is not its turn."""

    def __init__(
        self, name: str, model: str, process: PeerProcess, unavailable: dict[str, str], noted_as: str = ""
    ) -> None:
        self.name, self.model = name, model
        self._process, self._unavailable, self._noted_as = process, unavailable, noted_as or name
        self._process.pause()

    def measure(self, model: str, prompt_tokens: int, new_tokens: int, callers: int, seconds: float) -> float | None:
        """New tokens a second of batches of as many prompts as callers; None once it has ended, whose reason is
        noted.
        """
        if self._noted_as in self._unavailable:
            return None
        order = {"prompt_tokens": prompt_tokens, "new_tokens": new_tokens, "callers": callers, "seconds": seconds}
        self._process.resume()
        try:
            self._process.tell({"vocabulary": [FIRST_WORD, VOCABULARY], **order})
            return float(self._process.hear("measured", seconds + _TURN_LIMIT_S)["tokens_per_s"])
        except PeerUnavailable as error:
            self._unavailable[self._noted_as] = error.reason
            return None
        finally:
            self._process.pause()


@contextmanager
def running_generation_peers(folder: Path, unavailable: dict[str, str]) -> Iterator[Sequence[GenerationPeer]]:
    """Those that can be had, ready; ended with the block. Notes the reasons of the others in `unavailable`."""
    expected = json.loads((folder / EXPECTED_FILE).read_text())

    def fault_of(model: str) -> FindFault:
        token_ids = expected[model]["token_ids"]
        return lambda found: "" if found == token_ids else f"generates {found}, and transformers {token_ids}"

    prompts = {model: (made["prompt"], len(made["token_ids"])) for model, made in expected.items()}
    with ExitStack() as stack:
        running = []
        for name, model in GENERATION_PEERS.items():
            peer = start_peer(stack, name, model, (str(folder), model), prompts[model], fault_of(model), unavailable)
            running += [peer] if peer else []
        yield running


def start_peer(
    stack: ExitStack,
    name: str,
    model: str,
    words: Sequence[str],
    prompt: tuple[Sequence[int], int],
    find_fault: FindFault,
    unavailable: dict[str, str],
    noted_as: str = "",
) -> GenerationPeer | None:
    """A peer whose tokens after a prompt (and their number) have no fault; None where its reason is noted. The stack
    ends it. `words`: those of its script.
    """
    try:
        process = _start(stack, name, words, prompt, find_fault)
        return GenerationPeer(name, model, process, unavailable, noted_as)
    except PeerUnavailable as error:
        unavailable[noted_as or name] = error.reason
        return None


def _start(
    stack: ExitStack, name: str, words: Sequence[str], prompt: tuple[Sequence[int], int], find_fault: FindFault
) -> PeerProcess:
    script = f"tests.bench.peers.{name.replace('-', '_')}_alone"
    with ExitStack() as own:
        process = own.enter_context(PeerProcess(name, [peer_python(name), "-m", script, *words]))
        process.hear("ready", _START_LIMIT_S)
        process.tell({"prompt": prompt[0], "new_tokens": prompt[1]})
        if fault := find_fault(process.hear("generated", _TURN_LIMIT_S)["token_ids"]):
            raise PeerUnavailable(name, fault)
        stack.push(own.pop_all())
    return process
