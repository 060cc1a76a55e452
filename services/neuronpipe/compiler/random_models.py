"""Models of the sizes that are published, with random weights from a fixed seed, for measurements.

Times depend on shapes, not on weights. The tokenizer of each model is WordPiece over the words of given texts.
"""

import collections
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

_SEED = 20261123
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_PAD, _CLS, _SEP = 0, 2, 3
_MAX_TOKENS = 512
# Words in a vocabulary. The rest are names of unused tokens, as in BERT's vocabulary.
_MOST_WORDS = 20_000
_IDS = {"pad_token_id": _PAD, "cls_token_id": _CLS, "sep_token_id": _SEP, "bos_token_id": _CLS, "eos_token_id": _SEP}

# Name → its configuration on the Hub, without values that are defaults of transformers.
_CONFIGURATIONS: Mapping[str, Callable[[], Any]] = {
    "bert-base-uncased": lambda: transformers.BertConfig(**_IDS),
    "bert-large-uncased": lambda: transformers.BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096, **_IDS
    ),
    "distilbert-base-uncased": lambda: transformers.DistilBertConfig(**_IDS),
    "roberta-base": lambda: transformers.RobertaConfig(
        vocab_size=50265, max_position_embeddings=514, type_vocab_size=1, **_IDS
    ),
    "albert-base-v2": lambda: transformers.AlbertConfig(
        hidden_size=768, num_attention_heads=12, intermediate_size=3072, **_IDS
    ),
    "modernbert-base": lambda: transformers.ModernBertConfig(**_IDS),
    "vit-base-patch16-224": lambda: transformers.ViTConfig(num_labels=1000),
}


def save_random_model(name: str, folder: Path, texts: Iterable[str]) -> None:
    """Writes a classifier of a published size, as transformers saves it. Raises KeyError if the name is unknown."""
    config = _CONFIGURATIONS[name]()
    takes_images = config.model_type == "vit"
    kind = "Image" if takes_images else "Sequence"
    auto = getattr(transformers, f"AutoModelFor{kind}Classification")
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(_SEED)
    auto.from_config(config).float().eval().save_pretrained(folder)
    if takes_images:
        (folder / "preprocessor_config.json").write_text('{"image_processor_type": "ViTImageProcessor"}')
        return
    inputs = ["input_ids", "attention_mask"]
    if config.model_type in ("bert", "albert"):
        inputs.insert(1, "token_type_ids")
    described = {
        **{f"{name}_token": f"[{name.upper()}]" for name in ("cls", "sep", "pad", "unk", "mask")},
        "tokenizer_class": "BertTokenizer",
        "model_max_length": _MAX_TOKENS,
        "model_input_names": inputs,
    }
    (folder / "vocab.txt").write_text("\n".join(_vocabulary(texts, config.vocab_size)), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    # Without this file transformers 5 loads the tokenizer only for a BERT.
    transformers.BertTokenizerFast.from_pretrained(folder).backend_tokenizer.save(str(folder / "tokenizer.json"))


def _vocabulary(texts: Iterable[str], size: int) -> Iterable[str]:
    """Returns the commonest words, and the characters of all words for the rare words."""
    words = collections.Counter(word for text in texts for word in re.findall(r"[a-z]+|[^\sa-z]", text.lower()))
    characters = sorted({character for word in words for character in word})
    pieces = [*_SPECIAL, *characters, *(f"##{character}" for character in characters)]
    pieces += [word for word, _ in words.most_common(_MOST_WORDS) if len(word) > 1]
    vocabulary = dict.fromkeys(pieces[:size])
    return vocabulary | dict.fromkeys(f"[unused{number}]" for number in range(size - len(vocabulary)))
