"""Semantic search over a folder: finds the paragraphs of its .txt and .md files that are nearest in meaning to a query.

Usage: python semantic_search.py FOLDER QUERY [--target HOST:PORT] [--model NAME] [--top N]
"""

import argparse
import asyncio
import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from neuronpipe.api.v1.tasks_pb2 import Truncation
from neuronpipe.client import AsyncClient

# Requests in flight at once. The gateway's executor makes batches of them.
_AT_ONCE = 64


def read_paragraphs(folder: Path) -> list[tuple[Path, str]]:
    """Every paragraph with its file, in order."""
    files = sorted(path for path in folder.rglob("*") if path.suffix in (".txt", ".md"))
    parts = [(path, part.strip()) for path in files for part in re.split(r"\n\s*\n", path.read_text(encoding="utf-8"))]
    return [(path, part) for path, part in parts if part]


async def embed_all(client: AsyncClient, model: str, texts: list[str]) -> NDArray[np.float32]:
    """A vector of length one for each text: float32 [texts, width]. A text that is too long is cut at its end."""
    free = asyncio.Semaphore(_AT_ONCE)

    async def embed(text: str) -> NDArray[np.float32]:
        async with free:
            return await client.embed(model, text, truncation=Truncation.TRUNCATION_RIGHT)

    return np.stack(await asyncio.gather(*map(embed, texts)))


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("query")
    parser.add_argument("--target", default="127.0.0.1:50050")
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--top", type=int, default=3)
    options = parser.parse_args()

    paragraphs = read_paragraphs(options.folder)
    if not paragraphs:
        parser.error(f"{options.folder}: no .txt or .md file with text in it")
    # What is indexed may wait: bulk requests go behind those of people.
    async with AsyncClient(options.target, is_bulk=True) as client:
        vectors = await embed_all(client, options.model, [text for _, text in paragraphs])
    async with AsyncClient(options.target) as client:
        [query] = await embed_all(client, options.model, [options.query])
    similarities = vectors @ query  # cosines, as all vectors have length one
    for index in np.argsort(-similarities)[: options.top]:
        path, text = paragraphs[index]
        print(f"{similarities[index]:.3f}  {path.relative_to(options.folder)}  {' '.join(text.split())[:100]}")


if __name__ == "__main__":
    asyncio.run(main())
