"""Requests made from texts, for the task that the model has."""

from collections.abc import Callable, Sequence

from neuronpipe.api.v1.inference_pb2 import InferRequest, Priority
from neuronpipe.api.v1.tasks_pb2 import (
    FeatureExtractionInput,
    FillMaskInput,
    ImageClassificationInput,
    QuestionAnsweringInput,
    RerankInput,
    SentenceEmbeddingInput,
    SentenceSimilarityInput,
    TaskInput,
    TextClassificationInput,
    TokenClassificationInput,
    Truncation,
    ZeroShotClassificationInput,
)
from neuronpipe.core.errors import SetupError
from neuronpipe.load.images import make_image
from neuronpipe.load.request import LoadRequest

_QUESTION = "What is it that is described here?"
_CANDIDATE_LABELS = ("numbers", "text", "errors")
_CUT = Truncation.TRUNCATION_RIGHT

_PRIORITIES = {
    None: Priority.PRIORITY_UNSPECIFIED,
    "interactive": Priority.PRIORITY_INTERACTIVE,
    "bulk": Priority.PRIORITY_BULK,
}


def make_requests(request: LoadRequest, task: str, texts: Sequence[str]) -> list[InferRequest]:
    """One request a text. Raises SetupError for a task that is not known here."""
    if task not in _INPUTS:
        raise SetupError(f"--model {request.model}: has the task {task}; load is generated for {', '.join(_INPUTS)}")
    make_input = _INPUTS[task]
    priority = _PRIORITIES[request.priority]
    return [InferRequest(model=request.model, version=request.version, input=make_input(text), priority=priority) for text in texts]


def _text_classification(text: str) -> TaskInput:
    return TaskInput(text_classification=TextClassificationInput(text=text, truncation=_CUT))


def _sentence_embedding(text: str) -> TaskInput:
    return TaskInput(sentence_embedding=SentenceEmbeddingInput(text=text, truncation=_CUT))


def _question_answering(text: str) -> TaskInput:
    return TaskInput(question_answering=QuestionAnsweringInput(question=_QUESTION, context=text))


def _token_classification(text: str) -> TaskInput:
    return TaskInput(token_classification=TokenClassificationInput(text=text, truncation=_CUT))


def _fill_mask(text: str) -> TaskInput:
    return TaskInput(fill_mask=FillMaskInput(text=text, truncation=_CUT))


def _feature_extraction(text: str) -> TaskInput:
    return TaskInput(feature_extraction=FeatureExtractionInput(text=text, truncation=_CUT))


def _sentence_similarity(text: str) -> TaskInput:
    return TaskInput(sentence_similarity=SentenceSimilarityInput(source=_QUESTION, texts=[text], truncation=_CUT))


def _rerank(text: str) -> TaskInput:
    return TaskInput(rerank=RerankInput(query=_QUESTION, texts=[text], truncation=_CUT))


def _zero_shot_classification(text: str) -> TaskInput:
    input = ZeroShotClassificationInput(text=text, candidate_labels=_CANDIDATE_LABELS, truncation=_CUT)
    return TaskInput(zero_shot_classification=input)


def _image_classification(text: str) -> TaskInput:
    return TaskInput(image_classification=ImageClassificationInput(image=make_image(text)))


_INPUTS: dict[str, Callable[[str], TaskInput]] = {
    "text_classification": _text_classification,
    "sentence_embedding": _sentence_embedding,
    "question_answering": _question_answering,
    "token_classification": _token_classification,
    "fill_mask": _fill_mask,
    "feature_extraction": _feature_extraction,
    "sentence_similarity": _sentence_similarity,
    "rerank": _rerank,
    "zero_shot_classification": _zero_shot_classification,
    "image_classification": _image_classification,
}
