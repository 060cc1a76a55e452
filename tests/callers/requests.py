"""Short ways to write requests for the test models."""

from typing import Any

from neuronpipe.api.v1.inference_pb2 import InferRequest
from neuronpipe.api.v1.tasks_pb2 import (
    FillMaskInput,
    QuestionAnsweringInput,
    SentenceEmbeddingInput,
    TaskInput,
    TextClassificationInput,
    TokenClassificationInput,
)


def classify(
    text: str, *, model: str = "classifier", version: str = "", request_id: str = "", **options: Any
) -> InferRequest:
    """Makes a text classification."""
    input = TaskInput(text_classification=TextClassificationInput(text=text, **options))
    return InferRequest(model=model, version=version, request_id=request_id, input=input)


def embed(text: str, *, model: str = "minilm", **options: Any) -> InferRequest:
    """Makes a sentence embedding."""
    return InferRequest(model=model, input=TaskInput(sentence_embedding=SentenceEmbeddingInput(text=text, **options)))


def answer(question: str, context: str, *, model: str = "answerer", **options: Any) -> InferRequest:
    """Makes a question to answer."""
    input = QuestionAnsweringInput(question=question, context=context, **options)
    return InferRequest(model=model, input=TaskInput(question_answering=input))


def tag(text: str, *, model: str = "tagger", **options: Any) -> InferRequest:
    """Makes a token classification."""
    return InferRequest(
        model=model, input=TaskInput(token_classification=TokenClassificationInput(text=text, **options))
    )


def fill(text: str, *, model: str = "filler", **options: Any) -> InferRequest:
    """Masks to fill."""
    return InferRequest(model=model, input=TaskInput(fill_mask=FillMaskInput(text=text, **options)))
