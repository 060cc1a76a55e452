"""Hugging Face's JSON of each task: what it takes, as our input, and our result as what it gives.

As huggingface_hub's InferenceClient sends and reads it, and as transformers' pipelines call their parameters.
"""

import binascii
from base64 import b64decode
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import TypeAdapter

from neuronpipe.api.v1.tasks_pb2 import (
    Aggregation,
    EarlyStopping,
    FeatureExtractionInput,
    FillMaskInput,
    FinishReason,
    GeneratedText,
    GenerationOptions,
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
    SummarizationInput,
    TaskInput,
    TaskResult,
    TextClassificationInput,
    TextGenerationInput,
    TokenClassificationInput,
    TokenSequence,
    TranslationInput,
    Truncation,
    ZeroShotClassificationInput,
    ZeroShotImageClassificationInput,
)
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.model import ModelSpec
from neuronpipe.gateway.doors.http.huggingface_bodies import (
    Features,
    FillMask,
    GenerateParameters,
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
    WritingOptions,
    ZeroShotClassification,
    ZeroShotImageClassification,
)
from neuronpipe.gateway.doors.inference import truncation_of
from neuronpipe.gateway.doors.vectors import token_vectors, vector
from neuronpipe.tasks.text_generation import GenerationFacts

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
    """

    takes: TypeAdapter[Any]
    read: Callable[[Any, Any, ModelSpec], TaskInput]
    write: Callable[[TaskResult, Any, Any], Any]
    fields: Mapping[str, str]
    is_nested: bool = False
    option_fields: Callable[[Any], Mapping[str, str]] = lambda body: {}


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


class Prompted(Protocol):
    """A body of Hugging Face's or TGI's."""

    @property
    def parameters(self) -> GenerateParameters:
        """How to continue its text."""


_DRAWING = ("temperature", "top_k", "top_p", "min_p")
_SAMPLING = (*_DRAWING, "seed")
# Those that requests give by the same names.
_OPTIONS = tuple(name for name in WritingOptions.model_fields if name in GenerationOptions.DESCRIPTOR.fields_by_name)
# By what transformers calls them of a model with a decoder only, and with the token that the text follows.
_LENGTHS = {"max_new_tokens": "max_length", "min_new_tokens": "min_length"}
_REASONS = {
    FinishReason.FINISH_REASON_END: "eos_token",
    FinishReason.FINISH_REASON_STOP_STRING: "stop_sequence",
    FinishReason.FINISH_REASON_LENGTH: "length",
}


def _options(given: Mapping[str, Any]) -> GenerationOptions:
    """Options by transformers' names."""
    options = {name: value for name, value in given.items() if name in _OPTIONS}
    if isinstance(stops := options.get("stop_strings"), str):
        options["stop_strings"] = [stops]
    if "bad_words_ids" in options:
        options["bad_words_ids"] = [TokenSequence(token_ids=word) for word in options["bad_words_ids"]]
    if "early_stopping" in options:
        options["early_stopping"] = EarlyStopping.Value(f"EARLY_STOPPING_{str(options['early_stopping']).upper()}")
    return GenerationOptions(**options)


def _cuts(given: WritingOptions) -> "Truncation.ValueType":
    return truncation_of(given.truncation not in (None, False, "do_not_truncate"), None)


def _read_prompt(input: str, body: Prompted, model: ModelSpec) -> TaskInput:
    given = body.parameters
    fields = given.model_dump(exclude_none=True)
    is_drawn = _is_drawn(given)
    if given.do_sample is not None or is_drawn:
        fields["do_sample"] = is_drawn
    # A model of another task is refused later, by all doors alike.
    model_draws = model.task == "text_generation" and GenerationFacts.of(model).do_sample
    is_left_to_model = given.do_sample is None and (model_draws or (given.num_beams or 1) > 1)
    if not (is_drawn or is_left_to_model):
        fields = {name: value for name, value in fields.items() if name not in _SAMPLING}
    options = _options(fields)
    if given.details:
        options.top_logprobs = 0
    options.stop_strings.extend([*(given.stop or ()), *(given.stop_sequences or ())])
    return TaskInput(text_generation=TextGenerationInput(prompt=input, options=options, truncation=_cuts(given)))


def read_one_prompt(input: str, body: Prompted, model: ModelSpec) -> TaskInput:
    """The input of a request whose answer has one text. Raises InvalidInput."""
    if (body.parameters.num_return_sequences or 1) > 1:
        raise InvalidInput("parameters.num_return_sequences", "must be 1, since the answer has one text")
    return _read_prompt(input, body, model)


def _is_drawn(given: GenerateParameters) -> bool:
    """Whether the parameters say that tokens are drawn. A seed alone does not."""
    has_limits = (given.num_beams or 1) == 1 and any(getattr(given, name) is not None for name in _DRAWING)
    return has_limits if given.do_sample is None else given.do_sample


def _read_text(input: str, body: Summarization | Translation) -> dict[str, Any]:
    """The fields of a text that another is to be written about. Raises InvalidInput."""
    given = body.parameters
    beside = given.model_dump(exclude_none=True, exclude={"generate_parameters"})
    fields = given.generate_parameters.model_dump(exclude_none=True)
    for name in sorted(beside.keys() & fields.keys()):
        raise InvalidInput(f"parameters.{name}", "is in generate_parameters, too")
    fields |= beside
    for ours, theirs in _LENGTHS.items():
        if ours in fields and theirs in fields:
            raise InvalidInput(f"{_place(theirs, body)}.{theirs}", f"cannot be combined with {ours}")
        if theirs in fields:
            fields[ours] = max(0, fields[theirs] - 1)
    cuts = _cuts(given if given.truncation is not None else given.generate_parameters)
    return {"text": input, "options": _options(fields), "truncation": cuts}


def _place(name: str, body: Summarization | Translation) -> str:
    is_within = getattr(body.parameters.generate_parameters, name) is not None
    return "parameters.generate_parameters" if is_within else "parameters"


def _writing_fields(body: Summarization | Translation) -> dict[str, str]:
    """A request's names of options."""
    names = {f"options.{name}": f"{_place(name, body)}.{name}" for name in _OPTIONS}
    for ours, theirs in _LENGTHS.items():
        if getattr(body.parameters, theirs) or getattr(body.parameters.generate_parameters, theirs):
            names[f"options.{ours}"] = f"{_place(theirs, body)}.{theirs} - 1"
    return names


def _read_summary(input: str, body: Summarization, model: ModelSpec) -> TaskInput:
    return TaskInput(summarization=SummarizationInput(**_read_text(input, body)))


def _read_translation(input: str, body: Translation, model: ModelSpec) -> TaskInput:
    given = body.parameters
    fields = _read_text(input, body)
    fields |= {"source_language": given.src_lang or "", "target_language": given.tgt_lang or ""}
    return TaskInput(translation=TranslationInput(**fields))


def write_text(text: GeneratedText, prompt: str, body: Prompted) -> dict[str, Any]:
    """A generated text, and with `details` why it ended."""
    answer: dict[str, Any] = {"generated_text": prompt + text.text if body.parameters.return_full_text else text.text}
    if body.parameters.details:
        tokens = [
            {"id": one.token_id, "text": one.text, "logprob": one.logprob, "special": False} for one in text.logprobs
        ]
        answer["details"] = text_details(text, body) | {"prefill": [], "tokens": tokens}
    return answer


def text_details(text: GeneratedText, body: Prompted) -> dict[str, Any]:
    """Why a text ended, and how many tokens it has."""
    return {
        "finish_reason": _REASONS[text.finish_reason],
        "generated_tokens": len(text.token_ids),
        "seed": body.parameters.seed if _is_drawn(body.parameters) else None,
    }


def _labels(labels: "list[LabelScore]") -> Any:
    return [{"label": one.label, "score": one.score} for one in labels]


_TEXT = {"text": "inputs…", "text_pair": "inputs…"}
_LABEL_OPTIONS = {"top_k": "parameters.top_k", "function": "parameters.function_to_apply"}

TEXT_FIELDS = {
    "prompt": "inputs…",
    "truncation": "parameters.truncation",
    **{f"options.{name}": f"parameters.{name}" for name in _OPTIONS},
    "options.stop_strings": "parameters.stop",
    "options.top_logprobs": "parameters.details",
}

CONVERTERS: dict[str, Converter] = {
    "text_classification": Converter(
        TypeAdapter(TextClassification),
        _read_text_classification,
        lambda result, given, body: _labels(list(result.text_classification.labels)),
        _TEXT | _LABEL_OPTIONS,
        is_nested=True,
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
    ),
    "multi_vector_embedding": Converter(
        TypeAdapter(Features),
        _read_multi_vector,
        lambda result, given, body: token_vectors(result.multi_vector_embedding),
        {"text": "inputs…"},
    ),
    "sentence_similarity": Converter(
        TypeAdapter(SentenceSimilarity),
        _read_sentences,
        lambda result, given, body: list(result.sentence_similarity.scores),
        {"source": "inputs.source_sentence", "texts": "inputs.sentences"},
    ),
    "text_generation": Converter(
        TypeAdapter(TextGeneration),
        _read_prompt,
        lambda result, given, body: [write_text(one, given, body) for one in result.text_generation.sequences],
        TEXT_FIELDS,
    ),
    "summarization": Converter(
        TypeAdapter(Summarization),
        _read_summary,
        lambda result, given, body: [{"summary_text": one.text} for one in result.summarization.sequences],
        _TEXT,
        option_fields=_writing_fields,
    ),
    "translation": Converter(
        TypeAdapter(Translation),
        _read_translation,
        lambda result, given, body: [{"translation_text": one.text} for one in result.translation.sequences],
        _TEXT | {"source_language": "parameters.src_lang", "target_language": "parameters.tgt_lang"},
        option_fields=_writing_fields,
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
    ),
}
