"""Hugging Face's JSON of each task: converts bodies to our inputs, and our results to answers.

huggingface_hub's InferenceClient sends and reads this JSON, and transformers' pipelines have its parameters.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from operator import attrgetter, or_
from typing import Any

from pydantic import TypeAdapter

from neuronpipe.api.v1 import tasks_pb2 as tasks
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.model import ModelSpec
from neuronpipe.core.units import words_of
from neuronpipe.doors.http import huggingface_bodies as bodies
from neuronpipe.doors.http import huggingface_texts as texts
from neuronpipe.doors.http.bodies import read_image
from neuronpipe.doors.http.body_types import Body
from neuronpipe.doors.inference import check_second, truncation_of
from neuronpipe.doors.vectors import token_vectors, vector

# Fields of enumerations → the prefix of their values.
_PREFIXES = {"function": "SCORE_FUNCTION_", "aggregation": "AGGREGATION_"}
_Write = Callable[[Any, Any, Any], Any]


@dataclass(frozen=True, kw_only=True)
class Converter:
    """The conversions of one task.

    - `body_type`: the type of a body.
    - `write_answer`: makes the JSON of a result, from the result of the task, the caller's input and the body.
    - `fields`: the protocol's names for the fields of an input; see FieldNames.
    - `computed_fields`: makes the fields of an input that no field of the body holds as it is.
    - `read_input`: makes the whole input, for a task that generates.
    - `option_fields`: names of fields that depend on the body.
    - `is_nested`: the answer to a single input is also a list.
    - `task_names`: Hugging Face's names for the task, if it has other names than ours.
    """

    body_type: type[Body]
    write_answer: _Write
    fields: Mapping[str, str]
    computed_fields: Callable[[Any, Any, ModelSpec], Mapping[str, Any]] = lambda value, body, model: {}
    read_input: Callable[[Any, Any, ModelSpec], tasks.TaskInput] | None = None
    option_fields: Callable[[Any], Mapping[str, str]] = lambda body: {}
    is_nested: bool = False
    task_names: Sequence[str] = ()

    @cached_property
    def takes(self) -> TypeAdapter[Any]:
        """The adapter that checks a body and makes it from JSON."""
        return TypeAdapter(self.body_type)

    def read(self, task: str, value: Any, body: Any, model: ModelSpec) -> tasks.TaskInput:
        """Makes the input of the task for a value in `inputs`. Raises InvalidInput."""
        if self.read_input:
            return self.read_input(value, body, model)
        fields = {ours: _value(ours, theirs, value, body) for ours, theirs in self.fields.items()}
        fields |= self.computed_fields(value, body, model)
        # protobuf makes messages of dictionaries.
        given_fields: Any = {name: value for name, value in fields.items() if value is not None}
        return tasks.TaskInput(**{task: given_fields})


def _value(ours: str, theirs: str, input_value: Any, body: Any) -> Any:
    first, *path = theirs.replace("…", "").split(".")
    value = input_value if first == "inputs" else getattr(body, first)
    for name in path:
        value = getattr(value, name)
    if ours in _PREFIXES and value is not None:
        return _PREFIXES[ours] + value.upper()
    if ours == "truncation":
        return truncation_of(value, None)
    return read_image(value) if ours == "image" and isinstance(value, str) else value


def _pair(value: str | bodies.Pair, body: bodies.TextClassification, model: ModelSpec) -> Mapping[str, Any]:
    pair = {"text": value, "text_pair": None} if isinstance(value, str) else value.model_dump()
    if not isinstance(value, str):
        check_second("inputs", [value.text_pair])
        if body.parameters.truncation == "only_first":
            raise InvalidInput("parameters.truncation", "only_first is not supported for pairs; use longest_first")
    return pair | {"top_k": min(body.parameters.top_k or len(model.labels), len(model.labels))}


def _candidate_labels(value: str, body: bodies.ZeroShotClassification, model: ModelSpec) -> Mapping[str, Any]:
    labels = body.parameters.candidate_labels
    if isinstance(labels, str):
        labels = words_of(labels)
    return {"candidate_labels": labels}


def _features(*refused: str) -> Callable[[str, bodies.Features, ModelSpec], dict[str, Any]]:
    """Returns a function that makes the truncation of a text, and refuses parameters that the task does not have."""

    def truncation_fields(value: str, body: bodies.Features, model: ModelSpec) -> dict[str, Any]:
        for name in refused:
            if getattr(body, name):
                raise InvalidInput(name, "is for models of sentence embeddings")
        cuts = body.parameters.truncation if body.truncate is None else body.truncate
        return {"truncation": truncation_of(cuts, body.truncation_direction)}

    return truncation_fields


def _truncation_field(body: bodies.Features) -> dict[str, str]:
    """Returns the name of the truncation where it is a parameter of the pipeline."""
    is_parameter = body.truncate is None and body.parameters.truncation is not None
    return {"truncation": "parameters.truncation"} if is_parameter else {}


_cut, _cut_vectors = _features(), _features("normalize", "dimensions")


def _multi_vector(value: str, body: bodies.Features, model: ModelSpec) -> Mapping[str, Any]:
    """Reads `prompt_name` as the kind of the text."""
    fields = _cut_vectors(value, body, model)
    if body.prompt_name not in (None, "query", "document"):
        raise InvalidInput("prompt_name", "must be query or document for a model of late interaction")
    return fields | {"is_query": body.prompt_name == "query"}


def _rows(field: str, **ours_by_theirs: str) -> _Write:
    """Returns a function that writes each message in a field of the result as an object."""
    names, values_of = tuple(ours_by_theirs), attrgetter(*ours_by_theirs.values())
    if len(names) == 1:
        return lambda result, value, body: [{names[0]: values_of(message)} for message in getattr(result, field)]
    return lambda result, value, body: [
        dict(zip(names, values_of(message), strict=True)) for message in getattr(result, field)
    ]


_write_labels = _rows("labels", label="label", score="score")
_write_answers = _rows("answers", answer="text", score="score", start="start", end="end")


def _write_tokens(result: tasks.TokenClassificationResult, value: str, body: bodies.TokenClassification) -> Any:
    label = "entity" if body.parameters.aggregation_strategy == "none" else "entity_group"
    return [
        {label: entity.label, "score": entity.score, "word": entity.text, "start": entity.start, "end": entity.end}
        for entity in result.entities
    ]


def _write_masks(result: tasks.FillMaskResult, value: str, body: bodies.FillMask) -> Any:
    def written(mask: tasks.FilledMask, token: tasks.TokenScore) -> dict[str, Any]:
        text = fill_mask(value, mask, token.token)
        return {"score": token.score, "token": token.token_id, "token_str": token.token, "sequence": text}

    masks = [[written(mask, token) for token in mask.tokens] for mask in result.masks]
    return masks[0] if len(masks) == 1 else masks


def fill_mask(text: str, mask: tasks.FilledMask, token: str) -> str:
    """Returns the text with a token instead of the mask. A token that continues a word is joined to the word."""
    before, masked, after = text[: mask.start], text[mask.start : mask.end], text[mask.end :]
    if token.startswith("##") and token[2:3] not in ("", "#"):
        return before.rstrip() + token[2:] + after
    space = masked[: len(masked) - len(masked.lstrip())]  # some models' masks have the space before them
    return (before + space).removesuffix(" " if token.startswith(" ") else "") + token + after


def _write_best_answers(result: Any, value: bodies.Question, body: bodies.QuestionAnswering) -> Any:
    answers = _write_answers(result, value, body)
    if (body.parameters.top_k or 1) > 1:
        return answers
    return answers[0] if answers else {"answer": "", "score": 0.0, "start": 0, "end": 0}


def _parameters(*same: str, **others: str) -> dict[str, str]:
    """Returns names of fields in `parameters`. `same`: fields with the same name. `others`: fields by our name."""
    return {ours: f"parameters.{theirs}" for ours, theirs in ({name: name for name in same} | others).items()}


_CUTS = _parameters("truncation")
_PLAIN_TEXT = {"text": "inputs…"}
_TEXT = {"text": "inputs…", "text_pair": "inputs…"} | _CUTS
_LABELS = _parameters("candidate_labels", "hypothesis_template", "truncation")
_AGGREGATION, _FUNCTION = _parameters(aggregation="aggregation_strategy"), _parameters(function="function_to_apply")
_SCORED = _parameters("top_k") | _FUNCTION
_features_converter = partial(Converter, body_type=bodies.Features, option_fields=_truncation_field)

CONVERTERS = {
    "text_classification": Converter(
        body_type=bodies.TextClassification,
        write_answer=_write_labels,
        fields=_TEXT | _SCORED,
        computed_fields=_pair,
        is_nested=True,
        task_names=("text-classification", "sentiment-analysis"),
    ),
    "image_classification": Converter(
        body_type=bodies.ImageClassification,
        write_answer=_write_labels,
        fields={"image": "inputs…"} | _SCORED,
        computed_fields=lambda value, body, model: {"top_k": min(body.parameters.top_k or 0, len(model.labels))},
    ),
    "image_embedding": Converter(
        body_type=bodies.ImageFeatures,
        write_answer=lambda result, value, body: vector(result),
        fields={"image": "inputs…"},
        task_names=("image-feature-extraction",),
    ),
    "zero_shot_image_classification": Converter(
        body_type=bodies.ZeroShotImageClassification, write_answer=_write_labels, fields={"image": "inputs…"} | _LABELS
    ),
    "zero_shot_classification": Converter(
        body_type=bodies.ZeroShotClassification,
        write_answer=_write_labels,
        fields=_PLAIN_TEXT | _LABELS | _parameters("multi_label"),
        computed_fields=_candidate_labels,
    ),
    "token_classification": Converter(
        body_type=bodies.TokenClassification,
        write_answer=_write_tokens,
        fields=_PLAIN_TEXT | _parameters("truncation", "ignore_labels", window_stride_tokens="stride") | _AGGREGATION,
        computed_fields=lambda value, body, model: {"keep_all_labels": body.parameters.ignore_labels == []},
        task_names=("token-classification", "ner"),
    ),
    "zero_shot_token_classification": Converter(
        body_type=bodies.ZeroShotTokenClassification,
        write_answer=_rows("entities", entity_group="label", score="score", word="text", start="start", end="end"),
        fields=_PLAIN_TEXT
        | _parameters("candidate_labels", "threshold", "multi_label", "truncation", allow_nested="flat_ner"),
        computed_fields=lambda value, body, model: {"allow_nested": not body.parameters.flat_ner},
    ),
    "fill_mask": Converter(
        body_type=bodies.FillMask,
        write_answer=_write_masks,
        fields=_PLAIN_TEXT | _parameters("top_k", "targets", "truncation"),
    ),
    "question_answering": Converter(
        body_type=bodies.QuestionAnswering,
        write_answer=_write_best_answers,
        fields={"question": "inputs….question", "context": "inputs….context"}
        | _parameters("top_k", max_answer_tokens="max_answer_len", window_stride_tokens="doc_stride")
        | _parameters(allow_no_answer="handle_impossible_answer"),
    ),
    "sentence_embedding": _features_converter(
        write_answer=lambda result, value, body: vector(result),
        fields=_PLAIN_TEXT | {"dimensions": "dimensions", "prompt_name": "prompt_name", "truncation": "truncate"},
        computed_fields=lambda value, body, model: (
            _cut(value, body, model) | {"skip_normalize": body.normalize is False}
        ),
        task_names=("feature-extraction",),
    ),
    "feature_extraction": _features_converter(
        write_answer=lambda result, value, body: token_vectors(result),
        fields=_PLAIN_TEXT | {"truncation": "truncate"},
        computed_fields=_features("normalize", "dimensions", "prompt_name"),
    ),
    "sparse_embedding": _features_converter(
        write_answer=_rows("weights", index="token_id", value="weight", token="token"),  # noqa: S106 (a name of a field)
        fields=_PLAIN_TEXT | {"prompt_name": "prompt_name", "truncation": "truncate"},
        computed_fields=_cut_vectors,
        task_names=("feature-extraction",),
    ),
    "multi_vector_embedding": _features_converter(
        write_answer=lambda result, value, body: token_vectors(result),
        fields=_PLAIN_TEXT | {"truncation": "truncate"},
        computed_fields=_multi_vector,
        task_names=("feature-extraction",),
    ),
    "sentence_similarity": Converter(
        body_type=bodies.SentenceSimilarity,
        write_answer=lambda result, value, body: list(result.scores),
        fields={"source": "inputs.source_sentence", "texts": "inputs.sentences"} | _CUTS,
    ),
    "text_generation": Converter(
        body_type=bodies.TextGeneration,
        write_answer=lambda result, value, body: [texts.write_text(text, value, body) for text in result.sequences],
        fields=texts.TEXT_FIELDS,
        read_input=texts.read_prompt,
        option_fields=texts.prompt_fields,
    ),
    "summarization": Converter(
        body_type=bodies.Summarization,
        write_answer=_rows("sequences", summary_text="text"),
        fields=_TEXT,
        read_input=texts.read_summary,
        option_fields=texts.writing_fields,
    ),
    "translation": Converter(
        body_type=bodies.Translation,
        write_answer=_rows("sequences", translation_text="text"),
        fields=_TEXT | _parameters(source_language="src_lang", target_language="tgt_lang"),
        read_input=texts.read_translation,
        option_fields=texts.writing_fields,
    ),
    "rerank": Converter(
        body_type=bodies.TextRanking,
        write_answer=_rows("texts", index="index", score="score"),
        fields={"query": "inputs.query", "texts": "inputs.texts"} | _CUTS | _parameters(top_n="top_k") | _FUNCTION,
        computed_fields=lambda value, body, model: {"top_n": min(body.parameters.top_k or 0, len(value.texts))},
        task_names=("text-ranking",),
    ),
}
# A body of any task. The model's task decides which.
AnyBody: Any = reduce(or_, dict.fromkeys(converter.body_type for converter in CONVERTERS.values()))
