"""A client in another language needs protos/ and nothing else."""

import asyncio
import json
from pathlib import Path

import grpc
import pytest

from neuronpipe.client import AsyncClient
from tests.callers.requests import answer, classify, embed

FOLDER = Path(__file__).parents[1] / "node"
PROTOS = Path(__file__).parents[3] / "protos"


async def test_node_client_gets_the_same_answers_for_all_three_tasks(gateway_target: str) -> None:
    process = await asyncio.create_subprocess_exec(
        "node",
        str(FOLDER / "client.js"),
        gateway_target,
        str(PROTOS),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    found = json.loads(output)

    async with AsyncClient(gateway_target) as client:
        classified = (await client.infer(classify("The cat sat.", top_k=2))).result.text_classification.labels
        embedded = (await client.infer(embed("The cat sat.", dimensions=8))).result.sentence_embedding.embedding
        answered = (await client.infer(answer("Wie heißt er?", found["context"]))).result.question_answering.answers
    assert [(label["label"], label["score"]) for label in found["labels"]] == [
        (label.label, label.score) for label in classified
    ]
    # JavaScript prints a float32 as the double that it is read into.
    assert found["embedding"] == pytest.approx(list(embedded), abs=1e-7)
    assert [answer["text"] for answer in found["answers"]] == [answer.text for answer in answered]
    assert [(span["start"], span["end"]) for span in found["answers"]] == [(span.start, span.end) for span in answered]
    assert found["total_ns"] > 0
    assert found["refused"] == {"code": grpc.StatusCode.INVALID_ARGUMENT.value[0], "details": "text: is empty"}
