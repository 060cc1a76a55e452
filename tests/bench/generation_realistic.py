"""Generated texts of a model of realistic size: Qwen 2.5 of 0.5 B parameters by configuration, with random weights.

Run: python -m tests.bench.generation_realistic make FOLDER DTYPE   makes the model, and its bundle in a dtype
     python -m tests.bench.generation_realistic check SOURCE        reads a prompt and the tokens after it as JSON, and
prints how far they are from those that transformers would choose in float32.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from demo.processes import four_processes
from neuronpipe.measure.load.request import GenerationLoad, Lengths
from tests.bench.generation import ENGINE, beside_turns, of_model, run_turn, texts_of, times_between, with_tokens
from tests.bench.generation_alone import VOCABULARY, running_alone, serve_engine
from tests.bench.generation_peers import GENAI, LLAMA_CPP, start_peer
from tests.bench.measurements import Measurement
from tests.bench.peers.environments import CACHE, ROOT
from tests.bench.systems import FOUR, NO_CACHE, computed_dtypes, of_dtype, run_module

SECTION = "realistic"
QWEN = "qwen2.5-0.5b"
CALLERS = (1, 8)
DTYPES = ("int8-weights", "bfloat16")
# The names that llama.cpp's converter of ours has for them; its int8 is q8_0.
_LLAMA_CPP_DTYPES = {"int8-weights": "int8", "bfloat16": "bfloat16"}
# Each generated token: how far its logit may be below the largest one that transformers computes for the same tokens in
# float32, in standard deviations of the logits. Of random weights the first and the second are some 0.2 apart: another
# one is chosen by rounding. A wrong graph chooses at random, some 4 below.
MOST_BELOW = 0.5
_PROMPT, _TEXT, _CHECKED_TOKENS = 64, 48, 16
_SIZES = {
    "vocab_size": 151_936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 4096,
}  # fmt: skip


def measure_realistic(rounds: int, seconds: float, unavailable: dict[str, str]) -> Iterator[Measurement]:
    """The systems take turns, dtype by dtype; one that waits for its turn costs nothing. Throughput is of new tokens.
    Notes the reason of each peer that cannot be measured in `unavailable`.
    """
    load = GenerationLoad(prompt_tokens=Lengths.fixed(_PROMPT), output_tokens=Lengths.fixed(_TEXT))
    for dtype in (dtype for dtype in DTYPES if dtype != "bfloat16" or dtype in computed_dtypes()):
        folder = _find_model(dtype)
        with ExitStack() as stack:
            processes = stack.enter_context(
                four_processes(folder / "repository", stage_options={"tokenizer": NO_CACHE})
            )
            others: dict[str, Any] = {
                ENGINE: stack.enter_context(running_alone(partial(serve_engine, model=QWEN), folder))
            }
            words = {GENAI: (), LLAMA_CPP: (_LLAMA_CPP_DTYPES[dtype],)}
            for name, more in words.items():
                prompt = list(range(5, 5 + _PROMPT))
                noted_as = f"{SECTION}: {of_dtype(name, dtype)}"
                peer = start_peer(
                    *(stack, name, QWEN, (str(folder), QWEN, *more), (prompt, _CHECKED_TOKENS)),
                    *(partial(_find_fault, folder, prompt), unavailable, noted_as),
                )
                others |= {name: peer} if peer else {}
            model = of_dtype(QWEN, dtype)
            for round in range(rounds):
                for callers in CALLERS:
                    result = run_turn(processes["gateway"].target, QWEN, load, round, seconds, concurrency=callers)
                    found = texts_of(result)
                    system = of_model(model, FOUR)
                    turn = Measurement.of(result, SECTION, system, callers, round, times_between(found))
                    yield with_tokens(turn, found.output_tokens_per_s, found.first_token_ms)
                    yield from beside_turns(others, model, _PROMPT, callers, round, seconds, SECTION)


def _find_fault(folder: Path, prompt: Sequence[int], token_ids: Sequence[int]) -> str:
    command = [sys.executable, "-m", "tests.bench.generation_realistic", "check", str(folder / "sources" / QWEN)]
    given = json.dumps([prompt, token_ids])
    made = subprocess.run(command, check=True, input=given, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    below = json.loads(made.stdout.splitlines()[-1])
    return fault_of(below)


def fault_of(below: Sequence[float]) -> str:
    """The fault of tokens that are so far below the largest logits; empty where there is none."""
    return f"a token is {max(below):.2f} below the best; the limit is {MOST_BELOW:g}" if max(below) > MOST_BELOW else ""


def _find_model(dtype: str) -> Path:
    """Made in a process of its own: torch stays out of the one that measures."""
    folder = CACHE / f"generation-{QWEN}"
    if not (folder / dtype / "repository" / QWEN / "1/manifest.json").is_file():
        run_module("-m", "tests.bench.generation_realistic", "make", str(folder), dtype)
    return folder / dtype


def _make(folder: Path, dtype: str) -> None:
    """Saves the model in float32 once, and compiles it in a dtype. Random weights choose other tokens where numbers are
    rounded, so that the bundle has no least agreement; `check` takes its place.
    """
    import torch
    import transformers

    from tests.models.compiling import compile_model

    source = folder / "source"
    if not (source / "tokenizer.json").is_file():
        torch.manual_seed(0)
        config = transformers.Qwen2Config(
            **_SIZES, rms_norm_eps=1e-6, tie_word_embeddings=True, bos_token_id=0, eos_token_id=None
        )
        transformers.Qwen2ForCausalLM(config).save_pretrained(source)
        _make_tokenizer().save_pretrained(source)
    sources = folder / dtype / "sources"
    sources.mkdir(parents=True, exist_ok=True)
    link = sources / QWEN
    if not link.is_symlink():
        link.symlink_to(source)
    compile_model(source, folder / dtype / "repository", name=QWEN, dtype=dtype, min_agreement=1e-6)


def _make_tokenizer() -> Any:
    """The tokenizer of the small models, with a token of its own for every number of the vocabulary."""
    import tokenizers
    import transformers

    from demo.writer import train_tokenizer
    from tests.bench.generation_models import manual

    # The first is the one that transformers adds to every tokenizer of Qwen 2.
    special = ["<|endoftext|>", "<pad>", "<end>"]
    trained = train_tokenizer(manual(), VOCABULARY, special, model_max_length=_SIZES["max_position_embeddings"])
    described = json.loads(trained.backend_tokenizer.to_str())
    vocabulary = described["model"]["vocab"]
    # A byte-level tokenizer writes a space as Ġ.
    vocabulary |= {f"\u0120w{number}": number for number in range(len(vocabulary), _SIZES["vocab_size"])}
    names = dict(zip(("bos_token", "pad_token", "eos_token"), special, strict=True))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(json.dumps(described)),
        model_max_length=_SIZES["max_position_embeddings"],
        **names,
    )


def _check(source: Path) -> None:
    import torch
    import transformers

    prompt, token_ids = json.load(sys.stdin)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + token_ids])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(token_ids)[:, None])[:, 0]
    print(json.dumps(((logits.max(-1).values - chosen) / logits.std(-1)).tolist()))


if __name__ == "__main__":
    if sys.argv[1] == "make":
        _make(Path(sys.argv[2]), sys.argv[3])
    else:
        _check(Path(sys.argv[2]))
