"""Retrieval for a language model: vectors find candidate passages, and a cross-encoder ranks them again.

Prints the prompt with the best passages, each with its number, so that the answer can cite it. No language model is
called.

A passage that is longer than a model takes is compared by its beginning, and goes into the prompt whole.

Usage: python rag_rerank.py PASSAGES_FILE QUESTION [--target HOST:PORT] [--embedder NAME] [--reranker NAME]
"""

import argparse
import asyncio
from pathlib import Path

import numpy as np

from neuronpipe.api.v1.tasks_pb2 import Truncation
from neuronpipe.client import AsyncClient

_TRUNCATION = Truncation.TRUNCATION_RIGHT
_PROMPT = "Answer from these passages only, and cite their numbers.\n\n{passages}\n\nQuestion: {question}\nAnswer:"


async def find_candidates(client: AsyncClient, model: str, question: str, passages: list[str], count: int) -> list[str]:
    """The passages whose vectors are nearest to the question's, nearest first."""
    calls = (client.embed(model, text, truncation=_TRUNCATION) for text in [question, *passages])
    vectors = await asyncio.gather(*calls)
    nearest = np.argsort(-(np.stack(vectors[1:]) @ vectors[0]))
    return [passages[index] for index in nearest[:count]]


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("passages", type=Path, help="a text file, one passage a line")
    parser.add_argument("question")
    parser.add_argument("--target", default="127.0.0.1:50050")
    parser.add_argument("--embedder", default="minilm")
    parser.add_argument("--reranker", default="reranker")
    parser.add_argument("--candidates", type=int, default=20)
    parser.add_argument("--top", type=int, default=3)
    options = parser.parse_args()

    passages = [line for line in options.passages.read_text(encoding="utf-8").splitlines() if line.strip()]
    async with AsyncClient(options.target) as client:
        candidates = await find_candidates(client, options.embedder, options.question, passages, options.candidates)
        top = min(options.top, len(candidates))
        ranked = await client.rerank(options.reranker, options.question, candidates, top_n=top, truncation=_TRUNCATION)
    best = [f"[{number}] {candidates[text.index]}" for number, text in enumerate(ranked, start=1)]
    print(_PROMPT.format(passages="\n".join(best), question=options.question))


if __name__ == "__main__":
    asyncio.run(main())
