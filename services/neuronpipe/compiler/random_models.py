"""Models of the sizes that are published, with random weights from a fixed seed: for measuring where none are at hand.

Times depend on shapes, not on weights. The tokenizer is WordPiece over the words of given texts, for all of them.
"""

import collections
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

_SEED = 20261123
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_PAD, _CLS, _SEP = 0, 2, 3
_MAX_TOKENS = 512
# Of a vocabulary; the rest are names of unused tokens, as BERT's own has them.
_MOST_WORDS = 20_000
_IDS = {"pad_token_id": _PAD, "cls_token_id": _CLS, "sep_token_id": _SEP, "bos_token_id": _CLS, "eos_token_id": _SEP}

# name → its configuration, as the Hub has it; defaults of transformers are not named.
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
    """Writes a classifier of a published size, with its tokenizer or image processor, as transformers saves one.

    Raises KeyError for a name that is not known.
    """
    config = _CONFIGURATIONS[name]()
    takes_images = config.model_type == "vit"
    auto = (
        transformers.AutoModelForImageClassification
        if takes_images
        else transformers.AutoModelForSequenceClassification
    )
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(_SEED)
    auto.from_config(config).float().eval().save_pretrained(folder)
    if takes_images:
        (folder / "preprocessor_config.json").write_text(json.dumps(_IMAGE_PROCESSOR))
        return
    inputs = ["input_ids", "attention_mask"]
    if config.model_type in ("bert", "albert"):
        inputs.insert(1, "token_type_ids")
    (folder / "tokenizer.json").write_text(json.dumps(_word_piece(texts, config.vocab_size)))
    (folder / "tokenizer_config.json").write_text(json.dumps(_TOKENIZER | {"model_input_names": inputs}))


# Of google/vit-base-patch16-224.
_IMAGE_PROCESSOR = {
    "image_processor_type": "ViTImageProcessor",
    "do_resize": True,
    "size": {"height": 224, "width": 224},
    "resample": 2,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
_TOKENIZER = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_max_length": _MAX_TOKENS,
    **{f"{name}_token": token for name, token in zip(("pad", "unk", "cls", "sep", "mask"), _SPECIAL, strict=True)},
}


def _word_piece(texts: Iterable[str], size: int) -> dict[str, Any]:
    """A tokenizer.json: the commonest words, and all their characters for the others."""
    words = collections.Counter(word for text in texts for word in re.findall(r"[a-z]+|[^\sa-z]", text.lower()))
    characters = sorted({character for word in words for character in word})
    known = [*_SPECIAL, *characters, *(f"##{character}" for character in characters)]
    known += [word for word, _ in words.most_common(_MOST_WORDS) if len(word) > 1]
    vocabulary = dict.fromkeys(known[:size])
    vocabulary |= dict.fromkeys(f"[unused{number}]" for number in range(size - len(vocabulary)))
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": id, "content": token, "special": True, "normalized": False}
            | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
            for id, token in enumerate(_SPECIAL)
        ],
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": True,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": _template("[CLS]", "A", "[SEP]"),
            "pair": [*_template("[CLS]", "A", "[SEP]"), *_template("B", "[SEP]", type_id=1)],
            "special_tokens": {
                token: {"id": token, "ids": [id], "tokens": [token]} for token, id in (("[CLS]", _CLS), ("[SEP]", _SEP))
            },
        },
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": {token: id for id, token in enumerate(vocabulary)},
        },
    }


def _template(*parts: str, type_id: int = 0) -> Sequence[Mapping[str, Any]]:
    return [
        {"SpecialToken" if part.startswith("[") else "Sequence": {"id": part, "type_id": type_id}} for part in parts
    ]
