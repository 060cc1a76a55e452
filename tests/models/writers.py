"""Tiny compiled models of each task that generates."""

import shutil
from pathlib import Path

from tests.models.compiling import compile_model
from tests.models.decoders import save_decoder
from tests.models.encoder_decoders import save_encoder_decoder


def make_writers(folder: Path, writer: Path) -> None:
    """In `repository` the models `writer`, with a template for chats, `continuer`, without one, `summarizer` and
    `translator`. `writer`: the folder that tests.models.decoders.make_writer has filled.
    """
    shutil.copytree(writer, folder, dirs_exist_ok=True)
    sources = {
        "continuer": ("text_generation", save_decoder("gpt2", folder / "gpt2")),
        "summarizer": ("summarization", save_encoder_decoder("bart", folder / "bart")),
        "translator": ("translation", save_encoder_decoder("marian", folder / "marian")),
    }
    for name, (task, source) in sources.items():
        compile_model(source, folder / "repository", task, name=name, dtype="")
