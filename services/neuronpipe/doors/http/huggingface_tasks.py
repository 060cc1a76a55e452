"""Hugging Face's JSON of each task: what it takes, as our input, and our result as what it gives.

As huggingface_hub's InferenceClient sends and reads it, and as transformers' pipelines call their parameters.
"""

import binascii
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from neuronpipe.api.v1.tasks_pb2 import (
    Aggregation,
    FeatureExtractionInput,
    FillMaskInput,
    ImageClassificationInput,
    ImageEmbeddingInput,
    LabelScore,
    MultiVectorEmbeddingInput,
    QuestionAnsweringInput,
    RerankInput,
    ScoreFunction,
    SentenceEmbeddingInput,
    SentenceSimilarityInput,
    SparseEmbeddingInput,
    TaskInput,
    TaskResult,
    TextClassificationInput,
    TokenClassificationInput,
    ZeroShotClassificationInput,
    ZeroShotImageClassificationInput,
)
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.model import ModelSpec
from neuronpipe.doors.http.huggingface_bodies import (
    Features,
    FillMask,
    ImageClassification,
    ImageFeatures,
    Pair,
    Query,
    Question,
    QuestionAnswering,
    Sentences,
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
from neuronpipe.doors.inference import truncation_of
from neuronpipe.doors.vectors import token_vectors, vector

_FUNCTIONS = {
    None: ScoreFunction.SCORE_FUNCTION_UNSPECIFIED,
    "softmax": ScoreFunction.SCORE_FUNCTION_SOFTMAX,
    "sigmoid": ScoreFunction.SCORE_FUNCTION_SIGMOID,
    "none": ScoreFunction.SCORE_FUNCTION_NONE,
}
_AGGREGATIONS = {
    "none": Aggregation.AGGREGATION_NONE,
    "simple": Aggregation.AGGREGATION_SIMPLE,
    "first": Aggregation.AGGREGATION_FIRST,
    "average": Aggregation.AGGREGATION_AVERAGE,
    "max": Aggregation.AGGREGATION_MAX,
}


@dataclass(frozen=True, slots=True)
class Converter:
    """The conversions of one task.

    `takes`: the type of a body. `read`: converts one of its inputs to a TaskInput. `write`: converts a result to JSON.
    `fields`: the protocol's names for the fields of our input; "inputs…" is followed by the index if there are several.
    `is_nested`: a single input has its result in a list, too. `option_fields`: names of fields that depend on the body.
    `words`: Hugging Face's for the task, where they are not its name.
    """

    takes: TypeAdapter[Any]
    read: Callable[[Any, Any, ModelSpec], TaskInput]
    write: Callable[[TaskResult, Any, Any], Any]
    fields: Mapping[str, str]
    is_nested: bool = False
    option_fields: Callable[[Any], Mapping[str, str]] = lambda body: {}
    words: Sequence[str] = ()


def _read_text_classification(input: str | Pair, body: TextClassification, model: ModelSpec) -> TaskInput:
    texts = {"text": input} if isinstance(input, str) else {"text": input.text, "text_pair": input.text_pair}
    options = body.parameters
    return TaskInput(
        text_classification=TextClassificationInput(
            **texts,
            top_k=min(options.top_k or len(model.labels), len(model.labels)),
            function=_FUNCTIONS[options.function_to_apply],
            truncation=truncation_of(options.truncation, None),
        )
    )


def _read_image(input: str | bytes, body: ImageClassification, model: ModelSpec) -> TaskInput:
    options = body.parameters
    return TaskInput(
        image_classification=ImageClassificationInput(
            image=_image(input),
            top_k=min(options.top_k or 0, len(model.labels)),
            function=_FUNCTIONS[options.function_to_apply],
        )
    )


def _read_image_embedding(input: str | bytes, body: ImageFeatures, model: ModelSpec) -> TaskInput:
    return TaskInput(image_embedding=ImageEmbeddingInput(image=_image(input)))


def _read_zero_shot_image(input: str | bytes, body: ZeroShotImageClassification, model: ModelSpec) -> TaskInput:
    given = body.parameters
    return TaskInput(
        zero_shot_image_classification=ZeroShotImageClassificationInput(
            image=_image(input),
            candidate_labels=given.candidate_labels,
            hypothesis_template=given.hypothesis_template or "",
        )
    )


def _image(input: str | bytes) -> bytes:
    try:
        return input if isinstance(input, bytes) else b64decode(input, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidInput("inputs", "is no Base64") from None


def _read_zero_shot(input: str, body: ZeroShotClassification, model: ModelSpec) -> TaskInput:
    labels = body.parameters.candidate_labels
    return TaskInput(
        zero_shot_classification=ZeroShotClassificationInput(
            text=input,
            candidate_labels=[label.strip() for label in labels.split(",")] if isinstance(labels, str) else labels,
            multi_label=body.parameters.multi_label,
            hypothesis_template=body.parameters.hypothesis_template or "",
        )
    )


def _read_tokens(input: str, body: TokenClassification, model: ModelSpec) -> TaskInput:
    options = body.parameters
    return TaskInput(
        token_classification=TokenClassificationInput(
            text=input,
            aggregation=_AGGREGATIONS[options.aggregation_strategy],
            ignore_labels=options.ignore_labels or (),
            keep_all_labels=options.ignore_labels == [],
            window_stride_tokens=options.stride or 0,
        )
    )


def _write_tokens(result: TaskResult, input: str, body: TokenClassification) -> Any:
    label = "entity" if body.parameters.aggregation_strategy == "none" else "entity_group"
    return [
        {label: one.label, "score": one.score, "word": one.text, "start": one.start, "end": one.end}
        for one in result.token_classification.entities
    ]


def _read_masks(input: str, body: FillMask, model: ModelSpec) -> TaskInput:
    options = body.parameters
    return TaskInput(fill_mask=FillMaskInput(text=input, top_k=options.top_k or 0, targets=options.targets or ()))


def _write_masks(result: TaskResult, input: str, body: FillMask) -> Any:
    masks = [
        [
            {
                "score": one.score,
                "token": one.token_id,
                "token_str": one.token,
                "sequence": f"{input[: mask.start]}{one.token}{input[mask.end :]}",
            }
            for one in mask.tokens
        ]
        for mask in result.fill_mask.masks
    ]
    return masks[0] if len(masks) == 1 else masks


def _read_question(input: Question, body: QuestionAnswering, model: ModelSpec) -> TaskInput:
    options = body.parameters
    return TaskInput(
        question_answering=QuestionAnsweringInput(
            question=input.question,
            context=input.context,
            top_k=options.top_k or 0,
            max_answer_tokens=options.max_answer_len or 0,
            window_stride_tokens=options.doc_stride or 0,
            allow_no_answer=options.handle_impossible_answer,
        )
    )


def _write_answers(result: TaskResult, input: Question, body: QuestionAnswering) -> Any:
    answers = [
        {"answer": one.text, "score": one.score, "start": one.start, "end": one.end}
        for one in result.question_answering.answers
    ]
    return answers if (body.parameters.top_k or 1) > 1 else answers[0]


def _read_embedding(input: str, body: Features, model: ModelSpec) -> TaskInput:
    return TaskInput(
        sentence_embedding=SentenceEmbeddingInput(
            text=input,
            skip_normalize=body.normalize is False,
            dimensions=body.dimensions or 0,
            prompt_name=body.prompt_name or "",
            truncation=truncation_of(body.truncate, body.truncation_direction),
        )
    )


def _read_features(input: str, body: Features, model: ModelSpec) -> TaskInput:
    _refuse(body, "normalize", "dimensions", "prompt_name")
    truncation = truncation_of(body.truncate, body.truncation_direction)
    return TaskInput(feature_extraction=FeatureExtractionInput(text=input, truncation=truncation))


def _read_sparse(input: str, body: Features, model: ModelSpec) -> TaskInput:
    _refuse(body, "normalize", "dimensions")
    truncation = truncation_of(body.truncate, body.truncation_direction)
    return TaskInput(
        sparse_embedding=SparseEmbeddingInput(text=input, prompt_name=body.prompt_name or "", truncation=truncation)
    )


def _read_multi_vector(input: str, body: Features, model: ModelSpec) -> TaskInput:
    """`prompt_name` says what the text is."""
    _refuse(body, "normalize", "dimensions")
    if body.prompt_name not in (None, "query", "document"):
        raise InvalidInput("prompt_name", "must be query or document for a model of late interaction")
    truncation = truncation_of(body.truncate, body.truncation_direction)
    is_query = body.prompt_name == "query"
    return TaskInput(
        multi_vector_embedding=MultiVectorEmbeddingInput(text=input, is_query=is_query, truncation=truncation)
    )


def _refuse(body: Features, *names: str) -> None:
    for name in names:
        if getattr(body, name):
            raise InvalidInput(name, "is for models of sentence embeddings")


def _read_sentences(input: Sentences, body: SentenceSimilarity, model: ModelSpec) -> TaskInput:
    return TaskInput(sentence_similarity=SentenceSimilarityInput(source=input.source_sentence, texts=input.sentences))


def _read_query(input: Query, body: TextRanking, model: ModelSpec) -> TaskInput:
    options = body.parameters
    return TaskInput(
        rerank=RerankInput(
            query=input.query,
            texts=input.texts,
            top_n=min(options.top_k or 0, len(input.texts)),
            function=_FUNCTIONS[options.function_to_apply],
            truncation=truncation_of(options.truncation, None),
        )
    )


def _labels(labels: "list[LabelScore]") -> Any:
    return [{"label": one.label, "score": one.score} for one in labels]


_TEXT = {"text": "inputs…", "text_pair": "inputs…"}
_LABEL_OPTIONS = {"top_k": "parameters.top_k", "function": "parameters.function_to_apply"}

CONVERTERS: dict[str, Converter] = {
    "text_classification": Converter(
        TypeAdapter(TextClassification),
        _read_text_classification,
        lambda result, given, body: _labels(list(result.text_classification.labels)),
        _TEXT | _LABEL_OPTIONS,
        is_nested=True,
        words=("text-classification", "sentiment-analysis"),
    ),
    "image_classification": Converter(
        TypeAdapter(ImageClassification),
        _read_image,
        lambda result, given, body: _labels(list(result.image_classification.labels)),
        {"image": "inputs…"} | _LABEL_OPTIONS,
    ),
    "image_embedding": Converter(
        TypeAdapter(ImageFeatures),
        _read_image_embedding,
        lambda result, given, body: vector(result.image_embedding),
        {"image": "inputs…"},
        words=("image-feature-extraction",),
    ),
    "zero_shot_image_classification": Converter(
        TypeAdapter(ZeroShotImageClassification),
        _read_zero_shot_image,
        lambda result, given, body: _labels(list(result.zero_shot_image_classification.labels)),
        {
            "image": "inputs…",
            "candidate_labels": "parameters.candidate_labels",
            "hypothesis_template": "parameters.hypothesis_template",
        },
    ),
    "zero_shot_classification": Converter(
        TypeAdapter(ZeroShotClassification),
        _read_zero_shot,
        lambda result, given, body: _labels(list(result.zero_shot_classification.labels)),
        {
            "text": "inputs…",
            "candidate_labels": "parameters.candidate_labels",
            "hypothesis_template": "parameters.hypothesis_template",
        },
    ),
    "token_classification": Converter(
        TypeAdapter(TokenClassification),
        _read_tokens,
        _write_tokens,
        {"text": "inputs…", "window_stride_tokens": "parameters.stride", "ignore_labels": "parameters.ignore_labels"},
        words=("token-classification", "ner"),
    ),
    "fill_mask": Converter(
        TypeAdapter(FillMask),
        _read_masks,
        _write_masks,
        {"text": "inputs…", "top_k": "parameters.top_k", "targets": "parameters.targets"},
    ),
    "question_answering": Converter(
        TypeAdapter(QuestionAnswering),
        _read_question,
        _write_answers,
        {
            "question": "inputs….question",
            "context": "inputs….context",
            "top_k": "parameters.top_k",
            "max_answer_tokens": "parameters.max_answer_len",
            "window_stride_tokens": "parameters.doc_stride",
        },
    ),
    "sentence_embedding": Converter(
        TypeAdapter(Features),
        _read_embedding,
        lambda result, given, body: vector(result.sentence_embedding),
        {"text": "inputs…"},
        words=("feature-extraction",),
    ),
    "feature_extraction": Converter(
        TypeAdapter(Features),
        _read_features,
        lambda result, given, body: token_vectors(result.feature_extraction),
        _TEXT,
    ),
    "sparse_embedding": Converter(
        TypeAdapter(Features),
        _read_sparse,
        lambda result, given, body: [
            {"index": one.token_id, "value": one.weight, "token": one.token} for one in result.sparse_embedding.weights
        ],
        {"text": "inputs…"},
        words=("feature-extraction",),
    ),
    "multi_vector_embedding": Converter(
        TypeAdapter(Features),
        _read_multi_vector,
        lambda result, given, body: token_vectors(result.multi_vector_embedding),
        {"text": "inputs…"},
        words=("feature-extraction",),
    ),
    "sentence_similarity": Converter(
        TypeAdapter(SentenceSimilarity),
        _read_sentences,
        lambda result, given, body: list(result.sentence_similarity.scores),
        {"source": "inputs.source_sentence", "texts": "inputs.sentences"},
    ),
    "text_generation": Converter(
        TypeAdapter(TextGeneration),
        read_prompt,
        lambda result, given, body: [write_text(one, given, body) for one in result.text_generation.sequences],
        TEXT_FIELDS,
        option_fields=form_fields,
    ),
    "summarization": Converter(
        TypeAdapter(Summarization),
        read_summary,
        lambda result, given, body: [{"summary_text": one.text} for one in result.summarization.sequences],
        _TEXT,
        option_fields=writing_fields,
    ),
    "translation": Converter(
        TypeAdapter(Translation),
        read_translation,
        lambda result, given, body: [{"translation_text": one.text} for one in result.translation.sequences],
        _TEXT | {"source_language": "parameters.src_lang", "target_language": "parameters.tgt_lang"},
        option_fields=writing_fields,
    ),
    "rerank": Converter(
        TypeAdapter(TextRanking),
        _read_query,
        lambda result, given, body: [{"index": one.index, "score": one.score} for one in result.rerank.texts],
        {
            "query": "inputs.query",
            "texts": "inputs.texts",
            "top_n": "parameters.top_k",
            "function": "parameters.function_to_apply",
        },
        words=("text-ranking",),
    ),
}
