"""Forms of models that transformers does not read: how each is recognized, and how its encoder is written."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from neuronpipe.compiler import gliner, routers, static_embeddings

# The first function of a form reads it from a model's folder, and returns None for other models. The second function
# writes the encoder as a model of transformers. It gets the folder, the form, and a folder with links to the files.
_FORMS: tuple[tuple[Callable[[Path], Any], Callable[[Path, Any, Path], None]], ...] = (
    (static_embeddings.static_folder, static_embeddings.write_encoder),
    (routers.read_router, routers.write_document_side),
    (gliner.configuration_file, gliner.write_encoder),
)


def foreign_form(folder: Path) -> Callable[[Path], None] | None:
    """Returns a function that writes a model of a foreign form into a folder with links to its files; None for other
    models.

    Raises SetupError.
    """
    for read, write in _FORMS:
        if found := read(folder):
            return partial(write, folder, found)
    return None
