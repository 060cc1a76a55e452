"""CTranslate2 with float32 weights, in this process, converted from those of transformers."""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import ctranslate2
from ctranslate2.converters import TransformersConverter

from tests.bench.peers.generating import BEAMS, Prompts, answer_orders

# What its converter reads, which is in the files of published models; ours are saved by transformers 5.
_EXPECTED: Mapping[str, dict[str, object]] = {
    "config.json": {"normalize_before": False, "normalize_embedding": True},
    "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<pad>"},
}


def main() -> None:
    """Answers orders for the model of a folder of `tests.bench.generation_models`, by its name: one with an encoder."""
    source = Path(sys.argv[1]) / "sources" / sys.argv[2]
    with tempfile.TemporaryDirectory(prefix="ctranslate2-") as scratch:
        shutil.copytree(source, f"{scratch}/source")
        for name, expected in _EXPECTED.items():
            file = Path(scratch) / "source" / name
            file.write_text(json.dumps(json.loads(file.read_text()) | expected))
        folder = TransformersConverter(f"{scratch}/source").convert(f"{scratch}/model")
        threads = len(os.sched_getaffinity(0))
        translator = ctranslate2.Translator(
            folder, device="cpu", compute_type="float32", inter_threads=1, intra_threads=threads
        )
        words = (Path(folder) / "shared_vocabulary.json").read_text()
        vocabulary: list[str] = json.loads(words)
        ids = {word: number for number, word in enumerate(vocabulary)}

        def generate(prompts: Prompts, new_tokens: int) -> Prompts:
            made = translator.translate_batch(
                [[vocabulary[token_id] for token_id in prompt] for prompt in prompts],
                beam_size=BEAMS,
                min_decoding_length=new_tokens,
                max_decoding_length=new_tokens,
                max_batch_size=len(prompts),
            )
            return [[ids[word] for word in text.hypotheses[0]] for text in made]

        answer_orders(generate)


if __name__ == "__main__":
    main()
