"""What every peer that generates texts does: says that it is ready, reads orders from standard input, and answers each.

Such a peer is a script that runs in its own environment, for one model, and ends with its standard input.
"""

import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from tests.bench.peers.launching import say

# Of models with an encoder; others are greedy.
BEAMS = 4

Prompts: TypeAlias = Sequence[Sequence[int]]
# Token ids of prompts, and how many new ones each is to have: the new ones of each.
Generate: TypeAlias = Callable[[Prompts, int], Prompts]


def answer_orders(generate: Generate) -> None:
    """Generates what is ordered: one prompt to show its tokens, or batches of random ones for some seconds, one batch
    at least.
    """
    say(event="ready")
    for line in sys.stdin:
        order = json.loads(line)
        if "prompt" in order:
            (token_ids,) = generate([order["prompt"]], order["new_tokens"])
            say(event="generated", token_ids=[int(token_id) for token_id in token_ids])
        else:
            say(event="measured", tokens_per_s=measure(generate, **order))


def measure(
    generate: Generate, vocabulary: Sequence[int], prompt_tokens: int, new_tokens: int, callers: int, seconds: float
) -> float:
    """New tokens a second, in batches of random prompts. `vocabulary`: their first id, and the number of ids."""
    source = random.Random(callers)
    texts, began_s = 0, time.perf_counter()
    while not texts or time.perf_counter() - began_s < seconds:
        made = generate([source.choices(range(*vocabulary), k=prompt_tokens) for _ in range(callers)], new_tokens)
        if short := next((len(text) for text in made if len(text) != new_tokens), None):
            raise RuntimeError(f"a text has {short} new tokens, not {new_tokens}")
        texts += callers
    return texts * new_tokens / (time.perf_counter() - began_s)
