"""Hugging Face's JSON of each task: what it takes, as our input, and our result as what it gives.

As huggingface_hub's InferenceClient sends and reads it, and as transformers' pipelines call their parameters.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from pydantic import TypeAdapter

from neuronpipe.api.v1.tasks_pb2 import FilledMask, LabelScore, TaskInput, TaskResult
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.model import ModelSpec
from neuronpipe.doors.http.bodies import read_base64
from neuronpipe.doors.http.huggingface_bodies import (
    Features,
    FillMask,
    ImageClassification,
    ImageFeatures,
    Pair,
    Query,
    Question,
    QuestionAnswering,
    SentenceSimilarity,
    Summarization,
    TextClassification,
    TextGeneration,
    TextRanking,
    TokenClassification,
    Translation,
    ZeroShotClassification,
    ZeroShotImageClassification,
)
from neuronpipe.doors.http.huggingface_texts import (
    TEXT_FIELDS,
    form_fields,
    read_prompt,
    read_summary,
    read_translation,
    write_text,
    writing_fields,
)
from neuronpipe.doors.inference import check_second, truncation_of
from neuronpipe.doors.vectors import token_vectors, vector

# Of the words of enumerations.
_PREFIXES = {"function": "SCORE_FUNCTION_", "aggregation": "AGGREGATION_"}


@dataclass(frozen=True, slots=True)
class Converter:
    """The conversions of one task.

    `takes`: the type of a body. `write`: converts a result to JSON. `fields`: the protocol's names for our input's
    fields; "inputs…" is followed by the index if there are several. `more`: fields that are not there by these names.
    `reads`: makes the whole input, of a task that generates. `is_nested`: a single input has its result in a list, too.
    `option_fields`: names of fields that depend on the body. `words`: Hugging Face's for the task, where they are not
    its name.
    """

    task: str
    takes: TypeAdapter[Any]
    write: Callable[[TaskResult, Any, Any], Any]
    fields: Mapping[str, str]
    more: Callable[[Any, Any, ModelSpec], Mapping[str, Any]] = lambda given, body, model: {}
    reads: Callable[[Any, Any, ModelSpec], TaskInput] | None = None
    is_nested: bool = False
    option_fields: Callable[[Any], Mapping[str, str]] = lambda body: {}
    words: Sequence[str] = ()

    def read(self, input: Any, body: Any, model: ModelSpec) -> TaskInput:
        """One of the inputs of a body. Raises InvalidInput."""
        if self.reads:
            return self.reads(input, body, model)
        found = {ours: _value(ours, theirs, input, body) for ours, theirs in self.fields.items()}
        fields = {**found, **self.more(input, body, model)}
        # protobuf makes messages of dictionaries.
        return TaskInput(**cast(Any, {self.task: {name: value for name, value in fields.items() if value is not None}}))


def _value(ours: str, theirs: str, input: Any, body: Any) -> Any:
    first, *path = theirs.replace("…", "").split(".")
    value = input if first == "inputs" else getattr(body, first)
    for name in path:
        value = getattr(value, name)
    if ours in _PREFIXES and value is not None:
        return _PREFIXES[ours] + value.upper()
    if ours == "truncation":
        return truncation_of(value, None)
    return _image(value) if ours == "image" else value


def _image(input: str | bytes) -> bytes:
    if isinstance(input, bytes):
        return input
    if input.startswith(("http://", "https://")):
        raise InvalidInput("inputs", "is an address; send the image itself, in Base64 or as the body")
    try:
        return read_base64(input)
    except ValueError as error:
        raise InvalidInput("inputs", str(error)) from None


def _of_pair(input: str | Pair, body: TextClassification, model: ModelSpec) -> Mapping[str, Any]:
    texts = {"text": input, "text_pair": None} if isinstance(input, str) else input.model_dump()
    if not isinstance(input, str):
        check_second("inputs", [input.text_pair])
        if body.parameters.truncation == "only_first":
            raise InvalidInput("parameters.truncation", "only_first is not supported for pairs; use longest_first")
    return texts | {"top_k": min(body.parameters.top_k or len(model.labels), len(model.labels))}


def _of_labels(input: str, body: ZeroShotClassification, model: ModelSpec) -> Mapping[str, Any]:
    labels = body.parameters.candidate_labels
    if isinstance(labels, str):
        labels = [stripped for label in labels.split(",") if (stripped := label.strip())]
    return {"candidate_labels": labels}


def _write_tokens(result: TaskResult, input: str, body: TokenClassification) -> Any:
    label = "entity" if body.parameters.aggregation_strategy == "none" else "entity_group"
    return [
        {label: one.label, "score": one.score, "word": one.text, "start": one.start, "end": one.end}
        for one in result.token_classification.entities
    ]


def _write_masks(result: TaskResult, input: str, body: FillMask) -> Any:
    masks = [
        [
            {
                "score": one.score,
                "token": one.token_id,
                "token_str": one.token,
                "sequence": fill_mask(input, mask, one.token),
            }
            for one in mask.tokens
        ]
        for mask in result.fill_mask.masks
    ]
    return masks[0] if len(masks) == 1 else masks


def fill_mask(text: str, mask: FilledMask, token: str) -> str:
    """The text with a token in the mask's place: one that continues a word is joined to it, others stay apart."""
    before, masked, after = text[: mask.start], text[mask.start : mask.end], text[mask.end :]
    if token.startswith("##") and token[2:3] not in ("", "#"):
        return before.rstrip() + token[2:] + after
    space = masked[: len(masked) - len(masked.lstrip())]  # some models' masks have the space before them
    return (before + space).removesuffix(" " if token.startswith(" ") else "") + token + after


def _write_answers(result: TaskResult, input: Question, body: QuestionAnswering) -> Any:
    answers = [
        {"answer": one.text, "score": one.score, "start": one.start, "end": one.end}
        for one in result.question_answering.answers
    ]
    if (body.parameters.top_k or 1) > 1:
        return answers
    return answers[0] if answers else {"answer": "", "score": 0.0, "start": 0, "end": 0}


def _cut(input: str, body: Features, model: ModelSpec) -> Mapping[str, Any]:
    cuts = body.parameters.truncation if body.truncate is None else body.truncate
    return {"truncation": truncation_of(cuts, body.truncation_direction)}


def _of_embedding(input: str, body: Features, model: ModelSpec) -> Mapping[str, Any]:
    return {"skip_normalize": body.normalize is False, **_cut(input, body, model)}


def _of_features(input: str, body: Features, model: ModelSpec) -> Mapping[str, Any]:
    _refuse(body, "normalize", "dimensions", "prompt_name")
    return {"text_pair": None, **_cut(input, body, model)}


def _of_sparse(input: str, body: Features, model: ModelSpec) -> Mapping[str, Any]:
    _refuse(body, "normalize", "dimensions")
    return _cut(input, body, model)


def _of_multi_vector(input: str, body: Features, model: ModelSpec) -> Mapping[str, Any]:
    """`prompt_name` says what the text is."""
    _refuse(body, "normalize", "dimensions")
    if body.prompt_name not in (None, "query", "document"):
        raise InvalidInput("prompt_name", "must be query or document for a model of late interaction")
    return {"is_query": body.prompt_name == "query", **_cut(input, body, model)}


def _refuse(body: Features, *names: str) -> None:
    for name in names:
        if getattr(body, name):
            raise InvalidInput(name, "is for models of sentence embeddings")


def _of_query(input: Query, body: TextRanking, model: ModelSpec) -> Mapping[str, Any]:
    return {"top_n": min(body.parameters.top_k or 0, len(input.texts))}


def _labels(labels: "list[LabelScore]") -> Any:
    return [{"label": one.label, "score": one.score} for one in labels]


_CUTS = {"truncation": "parameters.truncation"}
_TEXT = {"text": "inputs…", "text_pair": "inputs…"} | _CUTS
_LABEL_OPTIONS = {"top_k": "parameters.top_k", "function": "parameters.function_to_apply"}

_CONVERTERS = (
    Converter(
        "text_classification",
        TypeAdapter(TextClassification),
        lambda result, given, body: _labels(list(result.text_classification.labels)),
        _TEXT | _LABEL_OPTIONS,
        _of_pair,
        is_nested=True,
        words=("text-classification", "sentiment-analysis"),
    ),
    Converter(
        "image_classification",
        TypeAdapter(ImageClassification),
        lambda result, given, body: _labels(list(result.image_classification.labels)),
        {"image": "inputs…"} | _LABEL_OPTIONS,
        lambda given, body, model: {"top_k": min(body.parameters.top_k or 0, len(model.labels))},
    ),
    Converter(
        "image_embedding",
        TypeAdapter(ImageFeatures),
        lambda result, given, body: vector(result.image_embedding),
        {"image": "inputs…"},
        words=("image-feature-extraction",),
    ),
    Converter(
        "zero_shot_image_classification",
        TypeAdapter(ZeroShotImageClassification),
        lambda result, given, body: _labels(list(result.zero_shot_image_classification.labels)),
        {
            "image": "inputs…",
            "candidate_labels": "parameters.candidate_labels",
            "hypothesis_template": "parameters.hypothesis_template",
            **_CUTS,
        },
    ),
    Converter(
        "zero_shot_classification",
        TypeAdapter(ZeroShotClassification),
        lambda result, given, body: _labels(list(result.zero_shot_classification.labels)),
        {
            "text": "inputs…",
            "candidate_labels": "parameters.candidate_labels",
            "hypothesis_template": "parameters.hypothesis_template",
            "multi_label": "parameters.multi_label",
            **_CUTS,
        },
        _of_labels,
    ),
    Converter(
        "token_classification",
        TypeAdapter(TokenClassification),
        _write_tokens,
        {
            "text": "inputs…",
            "aggregation": "parameters.aggregation_strategy",
            "window_stride_tokens": "parameters.stride",
            "ignore_labels": "parameters.ignore_labels",
            **_CUTS,
        },
        lambda given, body, model: {"keep_all_labels": body.parameters.ignore_labels == []},
        words=("token-classification", "ner"),
    ),
    Converter(
        "fill_mask",
        TypeAdapter(FillMask),
        _write_masks,
        {"text": "inputs…", "top_k": "parameters.top_k", "targets": "parameters.targets"} | _CUTS,
    ),
    Converter(
        "question_answering",
        TypeAdapter(QuestionAnswering),
        _write_answers,
        {
            "question": "inputs….question",
            "context": "inputs….context",
            "top_k": "parameters.top_k",
            "max_answer_tokens": "parameters.max_answer_len",
            "window_stride_tokens": "parameters.doc_stride",
            "allow_no_answer": "parameters.handle_impossible_answer",
        },
    ),
    Converter(
        "sentence_embedding",
        TypeAdapter(Features),
        lambda result, given, body: vector(result.sentence_embedding),
        {"text": "inputs…", "dimensions": "dimensions", "prompt_name": "prompt_name", "truncation": "truncate"},
        _of_embedding,
        words=("feature-extraction",),
    ),
    Converter(
        "feature_extraction",
        TypeAdapter(Features),
        lambda result, given, body: token_vectors(result.feature_extraction),
        _TEXT | {"truncation": "truncate"},
        _of_features,
    ),
    Converter(
        "sparse_embedding",
        TypeAdapter(Features),
        lambda result, given, body: [
            {"index": one.token_id, "value": one.weight, "token": one.token} for one in result.sparse_embedding.weights
        ],
        {"text": "inputs…", "prompt_name": "prompt_name", "truncation": "truncate"},
        _of_sparse,
        words=("feature-extraction",),
    ),
    Converter(
        "multi_vector_embedding",
        TypeAdapter(Features),
        lambda result, given, body: token_vectors(result.multi_vector_embedding),
        {"text": "inputs…", "truncation": "truncate"},
        _of_multi_vector,
        words=("feature-extraction",),
    ),
    Converter(
        "sentence_similarity",
        TypeAdapter(SentenceSimilarity),
        lambda result, given, body: list(result.sentence_similarity.scores),
        {"source": "inputs.source_sentence", "texts": "inputs.sentences"} | _CUTS,
    ),
    Converter(
        "text_generation",
        TypeAdapter(TextGeneration),
        lambda result, given, body: [write_text(one, given, body) for one in result.text_generation.sequences],
        TEXT_FIELDS,
        reads=read_prompt,
        option_fields=form_fields,
    ),
    Converter(
        "summarization",
        TypeAdapter(Summarization),
        lambda result, given, body: [{"summary_text": one.text} for one in result.summarization.sequences],
        _TEXT,
        reads=read_summary,
        option_fields=writing_fields,
    ),
    Converter(
        "translation",
        TypeAdapter(Translation),
        lambda result, given, body: [{"translation_text": one.text} for one in result.translation.sequences],
        _TEXT | {"source_language": "parameters.src_lang", "target_language": "parameters.tgt_lang"},
        reads=read_translation,
        option_fields=writing_fields,
    ),
    Converter(
        "rerank",
        TypeAdapter(TextRanking),
        lambda result, given, body: [{"index": one.index, "score": one.score} for one in result.rerank.texts],
        {
            "query": "inputs.query",
            "texts": "inputs.texts",
            "top_n": "parameters.top_k",
            "function": "parameters.function_to_apply",
            **_CUTS,
        },
        _of_query,
        words=("text-ranking",),
    ),
)
CONVERTERS = {one.task: one for one in _CONVERTERS}
