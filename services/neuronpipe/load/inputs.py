"""Makes requests from texts, for the task of the model."""

from collections.abc import Callable, Sequence
from typing import Any

from neuronpipe.api.v1.inference_pb2 import InferRequest, Priority
from neuronpipe.api.v1.tasks_pb2 import TaskInput, Truncation
from neuronpipe.core.errors import SetupError
from neuronpipe.load.images import make_image
from neuronpipe.load.request import LoadRequest

_QUESTION = "What is it that is described here?"
_CANDIDATE_LABELS = ("numbers", "text", "errors")
_CUT = Truncation.TRUNCATION_RIGHT
_NEW_TOKENS = 32

_PRIORITIES = {
    None: Priority.PRIORITY_UNSPECIFIED,
    "interactive": Priority.PRIORITY_INTERACTIVE,
    "bulk": Priority.PRIORITY_BULK,
}


def make_requests(request: LoadRequest, task: str, texts: Sequence[str]) -> list[InferRequest]:
    """One request for each text. Raises SetupError for an unknown task."""
    if task not in _INPUTS:
        raise SetupError(f"--model {request.model}: has the task {task}; load is generated for {', '.join(_INPUTS)}")
    inputs = (TaskInput(**{task: _INPUTS[task](text)}) for text in texts)
    priority = _PRIORITIES[request.priority]
    return [
        InferRequest(model=request.model, version=request.version, input=input, priority=priority) for input in inputs
    ]


# task → the fields of its input.
_INPUTS: dict[str, Callable[[str], Any]] = {
    "text_classification": lambda text: {"text": text, "truncation": _CUT},
    "sentence_embedding": lambda text: {"text": text, "truncation": _CUT},
    "question_answering": lambda text: {"question": _QUESTION, "context": text},
    "token_classification": lambda text: {"text": text, "truncation": _CUT},
    "fill_mask": lambda text: {"text": text, "truncation": _CUT},
    "feature_extraction": lambda text: {"text": text, "truncation": _CUT},
    "sentence_similarity": lambda text: {"source": _QUESTION, "texts": [text], "truncation": _CUT},
    "rerank": lambda text: {"query": _QUESTION, "texts": [text], "truncation": _CUT},
    "zero_shot_classification": lambda text: {"text": text, "candidate_labels": _CANDIDATE_LABELS, "truncation": _CUT},
    "text_generation": lambda text: {"prompt": text, "truncation": _CUT, "options": {"max_new_tokens": _NEW_TOKENS}},
    "summarization": lambda text: {"text": text, "truncation": _CUT, "options": {"max_new_tokens": _NEW_TOKENS}},
    "translation": lambda text: {"text": text, "truncation": _CUT, "options": {"max_new_tokens": _NEW_TOKENS}},
    "sparse_embedding": lambda text: {"text": text, "truncation": _CUT},
    "multi_vector_embedding": lambda text: {"text": text, "truncation": _CUT},
    "image_classification": lambda text: {"image": make_image(text)},
}
