"""Question answering: the passages of a context that answer a question.

Equal to transformers 4's QuestionAnsweringPipeline (transformers 5 has none). A long context is read in overlapping
windows. Each window's start and end logits become probabilities, the best spans of all windows compete, and the
probabilities of equal passages are added. Differences:

- Spans of probability zero are left out. The pipeline fills a long list of answers with them.
- Special tokens in the texts are text (see tasks/base.py). The pipeline ends the question at the text "[SEP]".
"""

from collections.abc import Iterator

import numpy as np
from pydantic import Field

from neuronpipe.api.v1.tasks_pb2 import Answer, QuestionAnsweringInput, QuestionAnsweringResult
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.model import ModelSpec, TaskFacts
from neuronpipe.core.tensors import Array, Arrays, ArraySets
from neuronpipe.tasks.base import (
    Annotations,
    Encoded,
    Task,
    TextTokenizer,
    Window,
    check_text,
    check_windows,
    sequence,
    traits_of,
)
from neuronpipe.tasks.scores import softmax

# The pipeline's defaults. Source: transformers 4.57.6, pipelines/question_answering.py.
_MAX_WINDOW_TOKENS = 384
_DEFAULT_OVERLAP_TOKENS = 128
_DEFAULT_ANSWER_TOKENS = 15

_MAX_TOP_K = 100
_MAX_ANSWER_TOKENS = 512


class QuestionAnsweringFacts(TaskFacts):
    """Facts about a model for question answering."""

    encoded = ("cls_token_id",)

    cls_token_id: int | None = Field(None, description='the token that stands for "no answer"')


def check(input: QuestionAnsweringInput, model: ModelSpec) -> None:
    check_text("question", input.question)
    check_text("context", input.context)
    if input.top_k > _MAX_TOP_K:
        raise InvalidInput("top_k", f"{input.top_k}, the limit is {_MAX_TOP_K}")
    if input.max_answer_tokens > _MAX_ANSWER_TOKENS:
        raise InvalidInput("max_answer_tokens", f"{input.max_answer_tokens}, the limit is {_MAX_ANSWER_TOKENS}")


def encode(input: QuestionAnsweringInput, tokenizer: TextTokenizer, model: ModelSpec) -> Encoded:
    """Returns one sequence for each window; its `char_start`, `char_end` are -1 where no answer can begin or end."""
    window_tokens = min(model.max_tokens, _MAX_WINDOW_TOKENS)
    room = _room_tokens(input, tokenizer, window_tokens)
    overlap_tokens = _overlap_tokens(input, room, window_tokens)
    sizes = {"window_tokens": window_tokens, "room_tokens": room, "overlap_tokens": overlap_tokens}
    check_windows("context", input.context, tokenizer, **sizes)
    windows = tokenizer.encode_windows(
        input.question, input.context, max_tokens=window_tokens, overlap_tokens=overlap_tokens
    )
    if not any(len(window.token_ids) for window in windows):
        raise InvalidInput("context", "has no tokens")
    return Encoded([sequence(window, model) for window in windows], [_annotations(window, model) for window in windows])


def decode(
    input: QuestionAnsweringInput, model: ModelSpec, annotations: ArraySets, outputs: ArraySets
) -> QuestionAnsweringResult:
    """Returns the best answers from `start_logits` and `end_logits`, float32 [tokens] each."""
    top_k = input.top_k or 1
    answers: dict[str, Answer] = {}
    no_answer_score = 1.0
    for annotation, output in zip(annotations, outputs, strict=True):
        if not (annotation["char_end"] > 0).any():  # a blank context answers nothing
            continue
        start, end = _probabilities(annotation, output)
        no_answer_score = min(no_answer_score, float(start[0] * end[0]))
        start[0] = end[0] = 0
        max_tokens = input.max_answer_tokens or _DEFAULT_ANSWER_TOKENS
        for first, last, score in _best_spans(start, end, max_tokens, count=2 * top_k + 10):
            begin, stop = int(annotation["char_start"][first]), int(annotation["char_end"][last])
            text = input.context[begin:stop]
            answers.setdefault(text.lower(), Answer(text=text, start=begin, end=stop)).score += score
    ranked = list(answers.values())
    if input.allow_no_answer:
        ranked.append(Answer(score=no_answer_score))
    ranked.sort(key=lambda answer: answer.score, reverse=True)
    return QuestionAnsweringResult(answers=ranked[:top_k])


def _room_tokens(input: QuestionAnsweringInput, tokenizer: TextTokenizer, window_tokens: int) -> int:
    """Returns the number of context tokens that fit into a window with the question. Raises InvalidInput if it is 0."""
    question_tokens = tokenizer.count(input.question)
    room = window_tokens - question_tokens - tokenizer.special_tokens(pair=True)
    if room < 1:
        problem = f"{question_tokens} tokens leave no room for the context in a window of {window_tokens}"
        raise InvalidInput("question", problem)
    return room


def _overlap_tokens(input: QuestionAnsweringInput, room: int, window_tokens: int) -> int:
    """Returns the number of tokens by which windows overlap. Raises InvalidInput if windows would not advance."""
    if input.window_stride_tokens >= room:
        raise InvalidInput(
            "window_stride_tokens",
            f"{input.window_stride_tokens}, must be less than {room}, the tokens of the context that fit into a window",
        )
    # If windows would not advance with the pipeline's own default, they overlap by half of the room.
    default = min(window_tokens // 2, _DEFAULT_OVERLAP_TOKENS)
    return input.window_stride_tokens or (default if default < room else room // 2)


def _annotations(window: Window, model: ModelSpec) -> Arrays:
    # The first token of the window ([CLS]) stands for "no answer", and has a probability as an empty passage has.
    char_start, char_end = window.char_start.copy(), window.char_end.copy()
    if char_start[0] < 0 and window.token_ids[0] == QuestionAnsweringFacts.of(model).cls_token_id:
        char_start[0] = char_end[0] = 0
    return {"char_start": char_start, "char_end": char_end}


def _probabilities(annotation: Arrays, output: Arrays) -> tuple[Array, Array]:
    is_candidate = annotation["char_start"] >= 0
    start, end = (
        softmax(np.where(is_candidate, output[name], np.float32(-10000.0))) for name in ("start_logits", "end_logits")
    )
    return start, end


def _best_spans(start: Array, end: Array, max_tokens: int, *, count: int) -> Iterator[tuple[int, int, float]]:
    """Yields the first token, the last token and the probability of the `count` best spans up to `max_tokens`."""
    tokens = len(start)
    # scores[length - 1, first] is the probability of the span that starts at `first`: a band of the matrix start x end.
    scores = np.zeros((min(max_tokens, tokens), tokens), np.float32)
    for more in range(len(scores)):
        scores[more, : tokens - more] = start[: tokens - more] * end[more:]
    flat = scores.ravel()
    best = np.argpartition(-flat, count)[:count] if count < flat.size else np.arange(flat.size)
    for index in best[np.argsort(-flat[best], kind="stable")]:
        more, first = divmod(int(index), tokens)
        if flat[index] > 0:
            yield first, first + more, float(flat[index])


traits = traits_of("question", "context", "window_stride_tokens")
_ANNOTATIONS = {"char_start": "tokens", "char_end": "tokens"}
TASK = Task(
    "question_answering",
    check,
    traits,
    encode,
    decode,
    None,  # answers are parts of the context, so decode reads the whole input
    QuestionAnsweringFacts,
    Annotations(_ANNOTATIONS),
)
