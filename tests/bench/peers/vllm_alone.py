"""vLLM on CPUs, in this process."""

import sys

from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

from tests.bench.peers.generating import Prompts, answer_orders

_CACHE_BYTES = 1 << 30


def main() -> None:
    """Answers orders for the model of a folder of `tests.bench.generation_models`, by its name."""
    model = LLM(
        f"{sys.argv[1]}/sources/{sys.argv[2]}",
        dtype="float32",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=_CACHE_BYTES,
    )

    def generate(prompts: Prompts, new_tokens: int) -> Prompts:
        options = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        inputs = [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts]
        return [text.outputs[0].token_ids for text in model.generate(inputs, options, use_tqdm=False)]

    answer_orders(generate)


if __name__ == "__main__":
    main()
