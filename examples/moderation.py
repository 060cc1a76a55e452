"""A moderation service: an HTTP API that accepts, holds or blocks comments, by a classifier's scores.

POST /moderate  {"comments": ["…", "…"]}
→ {"decisions": [{"action": "pass" | "review" | "block", "label": "…", "score": 0.97}, …]}

Usage: python moderation.py --labels toxic,insult [--target HOST:PORT] [--model NAME] [--review 0.5]
                            [--block 0.9] [--port 8080]
"""

import argparse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

import uvicorn
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, Field

from neuronpipe.api.v1.inference_pb2 import InferRequest
from neuronpipe.api.v1.tasks_pb2 import ScoreFunction, TaskInput, TextClassificationInput, Truncation
from neuronpipe.client import AsyncClient, NeuronpipeError, Overloaded

Action = Literal["pass", "review", "block"]


class Comments(BaseModel):
    comments: list[str] = Field(min_length=1, max_length=100)


class Decision(BaseModel):
    action: Action
    label: str = ""
    score: float = 0.0


class Decisions(BaseModel):
    decisions: list[Decision]


def make_app(target: str, model: str, bad_labels: set[str], review: float, block: float) -> FastAPI:
    """The service.

    A comment is held if a label of `bad_labels` has a score of at least `review`, and blocked from `block` on.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncClient(target, timeout_s=5) as client:
            app.state.client = client
            app.state.label_count = len((await client.get_model(model)).labels)
            yield

    app = FastAPI(title="moderation", lifespan=lifespan)

    def request(comment: str) -> InferRequest:
        # Sigmoid: each label is judged by itself, and several may apply. A comment that is too long is judged by its
        # beginning.
        classified = TextClassificationInput(
            text=comment,
            top_k=app.state.label_count,
            function=ScoreFunction.SCORE_FUNCTION_SIGMOID,
            truncation=Truncation.TRUNCATION_RIGHT,
        )
        return InferRequest(model=model, input=TaskInput(text_classification=classified))

    @app.post("/moderate")
    async def moderate(body: Comments) -> Decisions:
        try:
            outcomes = await app.state.client.infer_batch([request(comment) for comment in body.comments])
        except Overloaded as error:
            raise HTTPException(503, error.message, {"Retry-After": str(max(1, round(error.retry_after_s)))}) from error
        except NeuronpipeError as error:
            raise HTTPException(502, error.message) from error
        decisions = []
        for outcome in outcomes:
            if outcome.HasField("error"):  # one comment of many: nobody has judged it, so a person does
                decisions.append(Decision(action="review"))
                continue
            found = outcome.response.result.text_classification.labels
            worst = max((label for label in found if label.label in bad_labels), key=lambda label: label.score)
            action: Action = "block" if worst.score >= block else "review" if worst.score >= review else "pass"
            decisions.append(Decision(action=action, label=worst.label, score=worst.score))
        return Decisions(decisions=decisions)

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--labels", required=True, help="the model's labels that are bad, with commas")
    parser.add_argument("--target", default="127.0.0.1:50050")
    parser.add_argument("--model", default="toxicity")
    parser.add_argument("--review", type=float, default=0.5)
    parser.add_argument("--block", type=float, default=0.9)
    parser.add_argument("--port", type=int, default=8080)
    options = parser.parse_args()
    app = make_app(options.target, options.model, set(options.labels.split(",")), options.review, options.block)
    uvicorn.run(app, host="127.0.0.1", port=options.port)


if __name__ == "__main__":
    main()
