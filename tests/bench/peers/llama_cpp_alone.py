"""llama.cpp's server with a model that generates, called from this process: a request has all prompts of a batch."""

import http.client
import json
import os
import sys
from pathlib import Path

from tests.bench.peers.generating import Prompts, answer_orders
from tests.bench.peers.llama_cpp import running_llama_server

# Tokens of a prompt and its text, and callers, at most.
_SLOT_TOKENS, _SLOTS = 256, 32


def main() -> None:
    """Answers orders for the model of a folder of `tests.bench.generation_models`, by its name, with weights of a dtype
    (`float32` where none is named).
    """
    source, (dtype, *_) = Path(sys.argv[1]) / "sources" / sys.argv[2], [*sys.argv[3:], "float32"]
    threads = str(len(os.sched_getaffinity(0)))
    computing = ("--threads", threads, "--threads-batch", threads, "--batch-size", "2048", "--ubatch-size", "512")
    # float32 is compared with the tokens of transformers: its cache, too.
    cache = ("--cache-type-k", "f32", "--cache-type-v", "f32") if dtype == "float32" else ()
    slots = ("--parallel", str(_SLOTS), "--ctx-size", str(_SLOTS * _SLOT_TOKENS))
    with running_llama_server(source, dtype, *computing, *cache, *slots) as port:

        def generate(prompts: Prompts, new_tokens: int) -> Prompts:
            order = {"prompt": [list(prompt) for prompt in prompts], "n_predict": new_tokens, "ignore_eos": True}
            how = {"temperature": 0, "cache_prompt": False, "return_tokens": True, "samplers": ["top_k"], "top_k": 1}
            connection = http.client.HTTPConnection("127.0.0.1", port)
            connection.request("POST", "/completion", json.dumps(order | how), {"Content-Type": "application/json"})
            answer = json.loads(connection.getresponse().read())
            connection.close()
            if isinstance(answer, dict) and "error" in answer:
                raise RuntimeError(str(answer["error"]))
            texts = answer if isinstance(answer, list) else [answer]
            return [text["tokens"] for text in sorted(texts, key=lambda text: text["index"])]

        answer_orders(generate)


if __name__ == "__main__":
    main()
