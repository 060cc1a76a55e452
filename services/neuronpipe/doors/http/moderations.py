"""OpenAI's moderations, which a model for text classification answers."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

from pydantic import Field

from neuronpipe.api.v1.tasks_pb2 import LabelScore
from neuronpipe.core.model import ModelSpec
from neuronpipe.doors.http.bodies import write_body
from neuronpipe.doors.http.body_types import Body, KeptTokens, Many, ModelBody, texts_of
from neuronpipe.doors.http.exchange import Answers, HttpRequest, HttpResponse, Route, named
from neuronpipe.doors.http.problems import OPENAI_ERROR
from neuronpipe.doors.inference import Inference, Inputs, cut_fields
from neuronpipe.doors.vectors import text_input
from neuronpipe.tasks.scores import ClassifierFacts

# A text is flagged if a category has at least this score.
_FLAGGED_FROM = 0.5


class ModeratedText(Body):
    type: Literal["text"]
    text: str


class Moderation(ModelBody):
    """A text that is too long is an error without `truncate_prompt_tokens`."""

    input: str | Many[str] | Many[ModeratedText] = Field(
        description="a text; several; or parts, which share one result"
    )
    truncate_prompt_tokens: KeptTokens | None = Field(
        None, description="vLLM's: tokens that are kept of a text; -1: as many as the model takes"
    )


_RESULT: Any = named(
    "ModerationResult",
    flagged=bool,
    categories=dict[str, bool],
    category_scores=dict[str, float],
    category_applied_input_types=dict[str, list[str]],
)
_ANSWER = named("Moderations", id=str, model=str, results=list[_RESULT])
MODERATIONS = Route("POST", "/v1/moderations", "OpenAI: harm in texts", Moderation, _ANSWER, error_form=OPENAI_ERROR)
_FIELDS = {"text": "input…", "truncation": "truncate_prompt_tokens", "truncation_tokens": "truncate_prompt_tokens"}


async def _moderations(inference: Inference, request: HttpRequest) -> HttpResponse:
    body: Moderation = request.body
    model = inference.choose(request.model(body.model), "text_classification")
    spec = inference.spec(model)
    options = {"top_k": len(spec.labels)} | cut_fields(body.truncate_prompt_tokens, None)
    texts = [part if isinstance(part, str) else part.text for part in texts_of(body.input)]  # type: ignore[arg-type]
    make = partial(text_input, "text_classification", **options)
    inputs = Inputs("input", texts, make, _FIELDS, is_list=isinstance(body.input, list))
    answers = await inference.each(request.call, model, inputs)
    scored = [[*answer.result.message.text_classification.labels] for answer in answers]
    if isinstance(body.input, list) and isinstance(body.input[0], ModeratedText):
        scored = [[label for labels in scored for label in labels]]
    results = [_result(_category_scores(labels, spec)) for labels in scored]
    answer = {"id": f"modr-{request.call.request_id}", "model": model.name, "results": results}
    return HttpResponse(write_body(answer))


ANSWERS: Answers[Inference] = [(MODERATIONS, _moderations)]


def _category_scores(labels: Sequence[LabelScore], spec: ModelSpec) -> dict[str, float]:
    """Returns the best score of each category, in the order of the model's labels."""
    categories = ClassifierFacts.of(spec).moderation_categories or {label: label for label in spec.labels}
    scores = {categories[label]: 0.0 for label in spec.labels if categories.get(label)}
    for scored in labels:
        if category := categories.get(scored.label):
            scores[category] = max(scores[category], scored.score)
    return scores


def _result(scores: Mapping[str, float]) -> dict[str, Any]:
    categories = {category: score >= _FLAGGED_FROM for category, score in scores.items()}
    return {
        "flagged": any(categories.values()),
        "categories": categories,
        "category_scores": scores,
        "category_applied_input_types": {category: ["text"] for category in scores},
    }
