"""The clients' methods for tasks."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Unpack, cast

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from numpy.typing import NDArray

from neuronpipe.api.v1.inference_pb2 import InferRequest, Priority
from neuronpipe.api.v1.tasks_pb2 import (
    Aggregation,
    Answer,
    EmbeddingPrecision,
    Entity,
    FeaturePooling,
    FeatureType,
    FilledMask,
    GeneratedText,
    LabelScore,
    RankedText,
    ScoreFunction,
    TaskInput,
    TaskResult,
    TextSpan,
    Token,
    TokenWeight,
    Truncation,
)
from neuronpipe.client.task_call import (
    EmbeddedChunk,
    Messages,
    TaskCall,
    TaskMethod,
    chunks_of,
    generation_request,
    to_array,
    valid_unicode,
    vector_of,
)
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.generation_options import GenerationFields

_KINDS = {FieldDescriptor.TYPE_STRING: (str, "one text"), FieldDescriptor.TYPE_BYTES: (bytes, "the bytes of a file")}


class TaskMethods:
    """A method for each task.

    The methods raise InvalidInput for a value that is not a text, or not a list of texts, before anything is sent.
    """

    def __init__(self, *, is_bulk: bool) -> None:
        self._priority = Priority.PRIORITY_BULK if is_bulk else Priority.PRIORITY_INTERACTIVE

    @TaskMethod
    def classify(
        self,
        model: str,
        text: str,
        text_pair: str = "",
        *,
        top_k: int = 1,
        function: "ScoreFunction.ValueType" = ScoreFunction.SCORE_FUNCTION_UNSPECIFIED,
        truncation: "Truncation.ValueType" = Truncation.TRUNCATION_ERROR,
        version: str = "",
    ) -> TaskCall[Sequence[LabelScore]]:
        """Returns the `top_k` labels of a text or a pair, best first."""
        fields = {"text": text, "text_pair": text_pair, "top_k": top_k, "function": function, "truncation": truncation}
        return self._prepare("text_classification", model, version, fields)

    @TaskMethod
    def embed(
        self,
        model: str,
        text: str,
        *,
        normalize: bool = True,
        dimensions: int = 0,
        prompt_name: str = "",
        precision: "EmbeddingPrecision.ValueType" = EmbeddingPrecision.EMBEDDING_PRECISION_UNSPECIFIED,
        truncation: "Truncation.ValueType" = Truncation.TRUNCATION_ERROR,
        version: str = "",
    ) -> TaskCall[NDArray[Any]]:
        """Returns the vector of a text: float32 [dimensions, or the model's width], or int8 or uint8 by `precision`.

        `prompt_name`: one of the `prompt_names` that get_model returns, instead of the model's default prompt.
        """
        fields = {
            "text": text,
            "skip_normalize": not normalize,
            "dimensions": dimensions,
            "prompt_name": prompt_name,
            "precision": precision,
            "truncation": truncation,
        }
        return self._prepare("sentence_embedding", model, version, fields)

    @TaskMethod
    def embed_sparse(
        self,
        model: str,
        text: str,
        *,
        top_k: int = 0,
        prompt_name: str = "",
        truncation: "Truncation.ValueType" = Truncation.TRUNCATION_ERROR,
        version: str = "",
    ) -> TaskCall[Sequence[TokenWeight]]:
        """Returns the `top_k` heaviest tokens of the vocabulary whose weight for a text is above zero; 0: all."""
        fields = {"text": text, "top_k": top_k, "prompt_name": prompt_name, "truncation": truncation}
        return self._prepare("sparse_embedding", model, version, fields)

    @TaskMethod
    def embed_tokens(
        self,
        model: str,
        text: str,
        *,
        is_query: bool = False,
        type: "FeatureType.ValueType" = FeatureType.FEATURE_TYPE_FLOAT32,
        truncation: "Truncation.ValueType" = Truncation.TRUNCATION_ERROR,
        version: str = "",
    ) -> TaskCall[NDArray[np.float32]]:
        """Returns the vectors of a query's or a document's tokens for late interaction: float32 [vectors, dimensions].

        `type` is the data type in which they are sent.
        """
        fields = {"text": text, "is_query": is_query, "type": type, "truncation": truncation}
        return self._prepare("multi_vector_embedding", model, version, fields)

    @TaskMethod
    def answer(
        self,
        model: str,
        question: str,
        context: str,
        *,
        top_k: int = 1,
        max_answer_tokens: int = 0,
        window_stride_tokens: int = 0,
        allow_no_answer: bool = False,
        version: str = "",
    ) -> TaskCall[Sequence[Answer]]:
        """Returns the `top_k` passages of the context that answer the question, best first."""
        fields = {
            "question": question,
            "context": context,
            "top_k": top_k,
            "max_answer_tokens": max_answer_tokens,
            "window_stride_tokens": window_stride_tokens,
            "allow_no_answer": allow_no_answer,
        }
        return self._prepare("question_answering", model, version, fields)

    @TaskMethod
    def find_entities(
        self,
        model: str,
        text: str,
        *,
        aggregation: "Aggregation.ValueType" = Aggregation.AGGREGATION_SIMPLE,
        ignore_labels: Sequence[str] = (),
        keep_all_labels: bool = False,
        window_stride_tokens: int = 0,
        truncation: "Truncation.ValueType" = Truncation.TRUNCATION_UNSPECIFIED,
        version: str = "",
    ) -> TaskCall[Sequence[Entity]]:
        """Returns the named entities of a text, in its order; with AGGREGATION_NONE a label for each token."""
        fields = {
            "text": text,
            "aggregation": aggregation,
            "ignore_labels": ignore_labels,
            "keep_all_labels": keep_all_labels,
            "window_stride_tokens": window_stride_tokens,
            "truncation": truncation,
        }
        return self._prepare("token_classification", model, version, fields)

    @TaskMethod
    def fill_masks(
        self,
        model: str,
        text: str,
        *,
        top_k: int = 0,
        targets: Sequence[str] = (),
        truncation: "Truncation.ValueType" = Truncation.TRUNCATION_ERROR,
        version: str = "",
    ) -> TaskCall[Sequence[FilledMask]]:
        """Returns the `top_k` tokens (default 5) that fit each mask, best first.

        get_model returns the model's `mask_token`.
        """
        fields = {"text": text, "top_k": top_k, "targets": targets, "truncation": truncation}
        return self._prepare("fill_mask", model, version, fields)

    @TaskMethod
    def extract_features(
        self,
        model: str,
        text: str,
        text_pair: str = "",
        *,
        pooling: "FeaturePooling.ValueType" = FeaturePooling.FEATURE_POOLING_NONE,
        type: "FeatureType.ValueType" = FeatureType.FEATURE_TYPE_FLOAT32,
        truncation: "Truncation.ValueType" = Truncation.TRUNCATION_ERROR,
        version: str = "",
    ) -> TaskCall[NDArray[np.float32]]:
        """Returns the token vectors of a text or a pair: float32 [tokens, width], or pooled [width].

        `type` is the data type in which they are sent.
        """
        fields = {"text": text, "text_pair": text_pair, "pooling": pooling, "type": type, "truncation": truncation}
        return self._prepare("feature_extraction", model, version, fields)

    @TaskMethod
    def embed_chunks(
        self,
        model: str,
        text: str,
        *,
        chunk_tokens: int = 0,
        chunks: Iterable[tuple[int, int]] = (),
        type: "FeatureType.ValueType" = FeatureType.FEATURE_TYPE_FLOAT32,
        truncation: "Truncation.ValueType" = Truncation.TRUNCATION_ERROR,
        version: str = "",
    ) -> TaskCall[Sequence[EmbeddedChunk]]:
        """Returns a vector for each chunk of a text that a model of feature extraction reads as a whole (late
        chunking).

        Each chunk has `chunk_tokens` tokens, or `chunks` gives them, each as a start and an end in Unicode code points.
        """
        spans = [TextSpan(start=start, end=end) for start, end in chunks]
        fields = {"text": text, "chunk_tokens": chunk_tokens, "chunks": spans, "type": type, "truncation": truncation}
        return self._prepare("feature_extraction", model, version, fields, chunks_of)

    @TaskMethod
    def compare(
        self,
        model: str,
        source: str,
        texts: Iterable[str],
        *,
        dimensions: int = 0,
        truncation: "Truncation.ValueType" = Truncation.TRUNCATION_ERROR,
        version: str = "",
    ) -> TaskCall[Sequence[float]]:
        """Returns the similarity of the source to each of the texts, from -1 to 1, in the order of the texts."""
        fields = {"source": source, "texts": texts, "dimensions": dimensions, "truncation": truncation}
        return self._prepare("sentence_similarity", model, version, fields)

    @TaskMethod
    def rerank(
        self,
        model: str,
        query: str,
        texts: Iterable[str],
        *,
        top_n: int = 0,
        function: "ScoreFunction.ValueType" = ScoreFunction.SCORE_FUNCTION_UNSPECIFIED,
        truncation: "Truncation.ValueType" = Truncation.TRUNCATION_ERROR,
        version: str = "",
    ) -> TaskCall[Sequence[RankedText]]:
        """Returns the `top_n` texts (0: all) that answer the query, best first, each with its index in `texts`."""
        fields = {"query": query, "texts": texts, "top_n": top_n, "function": function, "truncation": truncation}
        return self._prepare("rerank", model, version, fields)

    @TaskMethod
    def classify_zero_shot(
        self,
        model: str,
        text: str,
        candidate_labels: Iterable[str],
        *,
        hypothesis_template: str = "",
        multi_label: bool = False,
        truncation: "Truncation.ValueType" = Truncation.TRUNCATION_ERROR,
        version: str = "",
    ) -> TaskCall[Sequence[LabelScore]]:
        """Returns all candidate labels of a text, best first."""
        fields = {
            "text": text,
            "candidate_labels": candidate_labels,
            "hypothesis_template": hypothesis_template,
            "multi_label": multi_label,
            "truncation": truncation,
        }
        return self._prepare("zero_shot_classification", model, version, fields)

    @TaskMethod
    def classify_image(
        self,
        model: str,
        image: bytes,
        *,
        top_k: int = 0,
        function: "ScoreFunction.ValueType" = ScoreFunction.SCORE_FUNCTION_UNSPECIFIED,
        version: str = "",
    ) -> TaskCall[Sequence[LabelScore]]:
        """Returns the `top_k` labels (0: five, or all) of an image, best first.

        `image` is the bytes of a JPEG, PNG or WebP file.
        """
        fields = {"image": image, "top_k": top_k, "function": function}
        return self._prepare("image_classification", model, version, fields)

    @TaskMethod
    def embed_image(
        self, model: str, image: bytes, *, normalize: bool = True, dimensions: int = 0, version: str = ""
    ) -> TaskCall[NDArray[np.float32]]:
        """Returns the vector of an image: float32 [dimensions, or the model's width].

        `image` is the bytes of a JPEG, PNG or WebP file.
        """
        fields = {"image": image, "skip_normalize": not normalize, "dimensions": dimensions}
        return self._prepare("image_embedding", model, version, fields)

    @TaskMethod
    def classify_image_zero_shot(
        self,
        model: str,
        image: bytes,
        candidate_labels: Iterable[str],
        *,
        hypothesis_template: str = "",
        truncation: "Truncation.ValueType" = Truncation.TRUNCATION_ERROR,
        version: str = "",
    ) -> TaskCall[Sequence[LabelScore]]:
        """Returns the candidate labels with their scores for an image, best first.

        `image` is the bytes of a JPEG, PNG or WebP file.
        """
        fields = {
            "image": image,
            "candidate_labels": candidate_labels,
            "hypothesis_template": hypothesis_template,
            "truncation": truncation,
        }
        return self._prepare("zero_shot_image_classification", model, version, fields)

    @TaskMethod
    def generate_text(
        self,
        model: str,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        truncation: "Truncation.ValueType" = Truncation.TRUNCATION_ERROR,
        version: str = "",
        **options: Unpack[GenerationFields],
    ) -> TaskCall[GeneratedText]:
        """Returns the whole text that continues a prompt, or messages of a chat. `options` are the fields of
        GenerationOptions.

        `generate` returns the text in parts, and several texts.
        """
        return self._write(
            "text_generation", model, {"prompt": prompt, "messages": messages}, options, truncation, version
        )

    @TaskMethod
    def summarize(
        self,
        model: str,
        text: str,
        *,
        truncation: "Truncation.ValueType" = Truncation.TRUNCATION_ERROR,
        version: str = "",
        **options: Unpack[GenerationFields],
    ) -> TaskCall[GeneratedText]:
        """Returns the summary of a text. `options` are the fields of GenerationOptions."""
        return self._write("summarization", model, {"text": text}, options, truncation, version)

    @TaskMethod
    def translate(
        self,
        model: str,
        text: str,
        *,
        source_language: str = "",
        target_language: str = "",
        truncation: "Truncation.ValueType" = Truncation.TRUNCATION_ERROR,
        version: str = "",
        **options: Unpack[GenerationFields],
    ) -> TaskCall[GeneratedText]:
        """Returns the translation of a text; models of several languages need `target_language`.

        `options` are the fields of GenerationOptions.
        """
        texts = {"text": text, "source_language": source_language, "target_language": target_language}
        return self._write("translation", model, texts, options, truncation, version)

    @TaskMethod
    def tokenize(
        self, model: str, text: str, *, skip_special_tokens: bool = False, version: str = ""
    ) -> TaskCall[Sequence[Token]]:
        """Returns the tokens of a text, in its order."""
        fields = {"text": text, "skip_special_tokens": skip_special_tokens}
        return self._prepare("tokenization", model, version, fields)

    @TaskMethod
    def detokenize(
        self, model: str, token_ids: Iterable[int], *, skip_special_tokens: bool = False, version: str = ""
    ) -> TaskCall[str]:
        """Returns the text of the tokens with these ids."""
        fields = {"token_ids": token_ids, "skip_special_tokens": skip_special_tokens}
        return self._prepare("detokenization", model, version, fields)

    def _prepare(
        self,
        task: str,
        model: str,
        version: str,
        fields: Mapping[str, object],
        read: Callable[[Any], Any] | None = None,
    ) -> TaskCall[Any]:
        """`read`: makes the value of a result; by default the first field, as an array if it is a vector."""
        kinds = getattr(TaskInput(), task).DESCRIPTOR.fields_by_name
        checked = {name: _checked(kinds[name], value) for name, value in fields.items()}
        input = cast(TaskInput, {task: checked})  # protobuf makes messages of dictionaries
        with valid_unicode({"model": model, "version": version, **checked}):
            request = InferRequest(model=model, version=version, input=input, priority=self._priority)
        first = getattr(TaskResult(), task).DESCRIPTOR.fields[0].name
        reads = read or _ARRAYS.get(first) or attrgetter(first)
        return TaskCall(request, lambda result: reads(getattr(result, task)))

    def _write(
        self,
        task: str,
        model: str,
        fields: Mapping[str, object],
        options: GenerationFields,
        truncation: "Truncation.ValueType",
        version: str,
    ) -> TaskCall[GeneratedText]:
        """Raises InvalidInput for options of several texts, because the method returns one text."""
        request = generation_request(
            task, model, fields, options, truncation=truncation, version=version, priority=self._priority
        )
        if (texts := options.get("num_return_sequences") or 1) > 1:
            advice = "this method returns one; call infer, or stream, with an InferRequest"
            raise InvalidInput("options.num_return_sequences", f"{texts} texts, {advice}")
        return TaskCall(request, lambda result: getattr(result, task).sequences[0])


# The first field of a result → the function that makes an array of it.
_ARRAYS: Mapping[str, Callable[[Any], Any]] = {"embedding": vector_of, "data": to_array}


def _checked(field: FieldDescriptor, value: object) -> object:
    kind, wanted = _KINDS.get(field.type, (object, ""))
    if field.is_repeated:
        if isinstance(value, str) or not isinstance(
            value, Iterable
        ):  # each character of a text would count as an element
            raise InvalidInput(field.name, f"takes a list of {'texts' if kind is str else 'ids'}, not {_name(value)}")
        for element in (values := list(value)):
            if not isinstance(element, kind):
                raise InvalidInput(field.name, f"takes texts, not {_name(element)}")
        return values
    if not isinstance(value, kind):
        hint = "; infer_batch runs many inputs in one call" if isinstance(value, list | tuple) else ""
        raise InvalidInput(field.name, f"takes {wanted}, not {_name(value)}{hint}")
    return value


def _name(value: object) -> str:
    return f"a value of the type {type(value).__name__}"
