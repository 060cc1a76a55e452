"""Makes requests from texts, for the task of the model."""

from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from typing import Any

import numpy as np

from neuronpipe.api.v1.inference_pb2 import InferRequest, Priority
from neuronpipe.api.v1.tasks_pb2 import TaskInput, Truncation
from neuronpipe.core.errors import SetupError
from neuronpipe.measure.load.generation import TASKS, GenerationLoad
from neuronpipe.measure.load.images import make_image
from neuronpipe.measure.load.prompts import PromptMaker, Words
from neuronpipe.measure.load.request import LoadRequest

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
    return [_request(request, make_input(task, text)) for text in texts]


def generation_requests(
    request: LoadRequest,
    load: GenerationLoad,
    task: str,
    texts: Sequence[str],
    words: Words | None,
    seed: Sequence[int],
) -> Iterator[InferRequest]:
    """Requests for generated texts without end. `words`: what prompts are made of, where these have lengths of their
    own. Raises SetupError for a task that does not generate.
    """
    if task not in TASKS:
        raise SetupError(f"--generate: model {request.model} has the task {task}; it is for {', '.join(TASKS)}")
    return _generation_requests(request, load, task, texts, words, seed)


def _generation_requests(
    request: LoadRequest,
    load: GenerationLoad,
    task: str,
    texts: Sequence[str],
    words: Words | None,
    seed: Sequence[int],
) -> Iterator[InferRequest]:
    random, given = np.random.default_rng(seed), cycle(texts)
    maker = PromptMaker(words, seed) if words else None
    shared = PromptMaker(words, (request.seed,)).make(load.shared_prefix_tokens) if words else ""
    while True:
        text = maker.make(load.prompt_tokens.draw(random)) if maker and load.prompt_tokens else next(given)
        tokens = load.output_tokens.draw(random)
        options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "num_beams": load.num_beams}
        prompt = f"{shared} {text}" if shared else text
        field = "prompt" if task == "text_generation" else "text"
        fields: Any = {field: prompt, "truncation": _CUT, "options": options}
        yield _request(request, TaskInput(**{task: fields}))


def _request(request: LoadRequest, input: TaskInput) -> InferRequest:
    priority = _PRIORITIES[request.priority]
    return InferRequest(model=request.model, version=request.version, input=input, priority=priority)


def make_input(task: str, text: str) -> TaskInput:
    """The input of a task that _INPUTS has: the text, or an image made of it."""
    return TaskInput(**{task: _INPUTS[task](text)})


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
    "image_embedding": lambda text: {"image": make_image(text)},
    "zero_shot_image_classification": lambda text: {"image": make_image(text), "candidate_labels": _CANDIDATE_LABELS},
}
