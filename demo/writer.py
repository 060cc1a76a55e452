"""A tiny Llama made on the spot: trained on writer.txt for some seconds, until it writes sentences like those."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers, trainers

_TEXT = Path(__file__).with_suffix(".txt")
_VOCABULARY = 1000
_MAX_TOKENS = 256
# After 150 steps it repeats itself, after 250 it has learned most sentences.
_STEPS, _ROWS, _ROW_TOKENS = 250, 16, 64
# Smaller at the beginning: large first steps can end in a model that repeats one token.
_LEARNING_RATE, _WARM_UP_STEPS = 3e-3, 20


def make_writer(folder: Path) -> Path:
    """Writes the model with its tokenizer, the same each time on the same machine."""
    names = {"bos_token": "<end>", "eos_token": "<end>"}
    text = "\n".join(paragraphs())
    tokenizer = train_tokenizer([text], _VOCABULARY, ["<end>"], model_max_length=_MAX_TOKENS, **names)
    token_ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=_MAX_TOKENS,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = transformers.LlamaForCausalLM(config)
    with _one_thread():
        _train(model, token_ids)
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _train(model: Any, token_ids: torch.Tensor) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), _LEARNING_RATE)
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, _WARM_UP_STEPS, _STEPS)
    for _ in range(_STEPS):
        starts = torch.randint(len(token_ids) - _ROW_TOKENS, (_ROWS, 1))
        rows = token_ids[starts + torch.arange(_ROW_TOKENS)]
        model(input_ids=rows, labels=rows).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


@contextmanager
def _one_thread() -> Iterator[None]:
    """PyTorch's threads wait for each other after each of many small steps: beside another process that computes,
    training with two threads on two cores took 194 s, with one 18 s.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def paragraphs() -> list[str]:
    """The paragraphs of the text, each on a line."""
    return [" ".join(paragraph.split()) for paragraph in _TEXT.read_text(encoding="utf-8").split("\n\n")]


def train_tokenizer(
    texts: Sequence[str], vocabulary: int, special_tokens: Sequence[str], **settings: Any
) -> transformers.PreTrainedTokenizerFast:
    """A byte-level tokenizer of the characters of these texts. It leaves out others."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=[*special_tokens], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings)
