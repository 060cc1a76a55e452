"""The clients' methods for tasks. Their arguments are fields of the task's input; see TaskMethod."""

from collections.abc import Iterable, Sequence
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from neuronpipe.api.v1.inference_pb2 import Priority
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
    Token,
    TokenWeight,
    Truncation,
)
from neuronpipe.client.task_call import EmbeddedChunk, Messages, chunks_of, matrix_of, task_method
from neuronpipe.core.generation_options import GenerationFields


class TaskMethods:
    """A method for each task.

    The methods raise InvalidInput for a value that is not a text, or not a list of texts, before anything is sent.
    """

    def __init__(self, *, is_bulk: bool) -> None:
        self._priority = Priority.PRIORITY_BULK if is_bulk else Priority.PRIORITY_INTERACTIVE

    @task_method("text_classification")
    def classify(
        self,
        model: str,
        text: str,
        text_pair: str = "",
        *,
        top_k: int = 1,
        function: "ScoreFunction.ValueType" = ScoreFunction.SCORE_FUNCTION_UNSPECIFIED,
        truncation: "Truncation.ValueType" = Truncation.TRUNCATION_UNSPECIFIED,
        version: str = "",
    ) -> Sequence[LabelScore]:
        """Returns the `top_k` labels of a text or a pair, best first."""

    @task_method("sentence_embedding")
    def embed(
        self,
        model: str,
        text: str,
        *,
        normalize: bool = True,
        dimensions: int = 0,
        prompt_name: str = "",
        precision: "EmbeddingPrecision.ValueType" = EmbeddingPrecision.EMBEDDING_PRECISION_UNSPECIFIED,
        max_chunks: int = 0,
        truncation: "Truncation.ValueType" = Truncation.TRUNCATION_UNSPECIFIED,
        version: str = "",
    ) -> NDArray[Any]:
        """Returns the vector of a text: float32 [dimensions, or the model's width], or int8 or uint8 by `precision`.

        `prompt_name`: one of the `prompt_names` that get_model returns, instead of the model's default prompt.
        `max_chunks`: the most chunks of a text that is too long, whose vector is their mean; 0: none.
        """

    @task_method("sparse_embedding")
    def embed_sparse(
        self,
        model: str,
        text: str,
        *,
        top_k: int = 0,
        prompt_name: str = "",
        truncation: "Truncation.ValueType" = Truncation.TRUNCATION_UNSPECIFIED,
        version: str = "",
    ) -> Sequence[TokenWeight]:
        """Returns the `top_k` heaviest tokens of the vocabulary whose weight for a text is above zero; 0: all."""

    @task_method("sentence_embedding", matrix_of)
    def embed_texts(
        self,
        model: str,
        texts: Iterable[str],
        *,
        normalize: bool = True,
        dimensions: int = 0,
        prompt_name: str = "",
        precision: "EmbeddingPrecision.ValueType" = EmbeddingPrecision.EMBEDDING_PRECISION_UNSPECIFIED,
        max_chunks: int = 0,
        truncation: "Truncation.ValueType" = Truncation.TRUNCATION_UNSPECIFIED,
        version: str = "",
    ) -> NDArray[Any]:
        """Returns the vectors of 1 to 1024 texts: [texts, dimensions], with the options of `embed`."""

    @task_method("multi_vector_embedding")
    def embed_tokens(
        self,
        model: str,
        text: str,
        *,
        is_query: bool = False,
        type: "FeatureType.ValueType" = FeatureType.FEATURE_TYPE_FLOAT32,
        truncation: "Truncation.ValueType" = Truncation.TRUNCATION_UNSPECIFIED,
        version: str = "",
    ) -> NDArray[np.float32]:
        """Returns the vectors of a query's or a document's tokens for late interaction: float32 [vectors, dimensions].

        `type` is the data type in which they are sent.
        """

    @task_method("question_answering")
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
    ) -> Sequence[Answer]:
        """Returns the `top_k` passages of the context that answer the question, best first."""

    @task_method("token_classification")
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
    ) -> Sequence[Entity]:
        """Returns the named entities of a text, in its order; with AGGREGATION_NONE a label for each token."""

    @task_method("fill_mask")
    def fill_masks(
        self,
        model: str,
        text: str,
        *,
        top_k: int = 0,
        targets: Sequence[str] = (),
        truncation: "Truncation.ValueType" = Truncation.TRUNCATION_UNSPECIFIED,
        version: str = "",
    ) -> Sequence[FilledMask]:
        """Returns the `top_k` tokens (default 5) that fit each mask, best first.

        get_model returns the model's `mask_token`.
        """

    @task_method("feature_extraction")
    def extract_features(
        self,
        model: str,
        text: str,
        text_pair: str = "",
        *,
        pooling: "FeaturePooling.ValueType" = FeaturePooling.FEATURE_POOLING_NONE,
        type: "FeatureType.ValueType" = FeatureType.FEATURE_TYPE_FLOAT32,
        truncation: "Truncation.ValueType" = Truncation.TRUNCATION_UNSPECIFIED,
        version: str = "",
    ) -> NDArray[np.float32]:
        """Returns the token vectors of a text or a pair: float32 [tokens, width], or pooled [width].

        `type` is the data type in which they are sent.
        """

    @task_method("feature_extraction", chunks_of)
    def embed_chunks(
        self,
        model: str,
        text: str,
        *,
        chunk_tokens: int = 0,
        chunks: Iterable[tuple[int, int]] = (),
        type: "FeatureType.ValueType" = FeatureType.FEATURE_TYPE_FLOAT32,
        truncation: "Truncation.ValueType" = Truncation.TRUNCATION_UNSPECIFIED,
        version: str = "",
    ) -> Sequence[EmbeddedChunk]:
        """Returns a vector for each chunk of a text that a model of feature extraction reads as a whole (late
        chunking).

        Each chunk has `chunk_tokens` tokens, or `chunks` gives them, each as a start and an end in Unicode code points.
        """

    @task_method("sentence_similarity")
    def compare(
        self,
        model: str,
        source: str,
        texts: Iterable[str],
        *,
        dimensions: int = 0,
        truncation: "Truncation.ValueType" = Truncation.TRUNCATION_UNSPECIFIED,
        version: str = "",
    ) -> Sequence[float]:
        """Returns the similarity of the source to each of the texts, from -1 to 1, in the order of the texts."""

    @task_method("rerank")
    def rerank(
        self,
        model: str,
        query: str,
        texts: Iterable[str],
        *,
        top_n: int = 0,
        function: "ScoreFunction.ValueType" = ScoreFunction.SCORE_FUNCTION_UNSPECIFIED,
        max_chunks: int = 0,
        max_text_tokens: int = 0,
        truncation: "Truncation.ValueType" = Truncation.TRUNCATION_UNSPECIFIED,
        version: str = "",
    ) -> Sequence[RankedText]:
        """Returns the `top_n` texts (0: all) that answer the query, best first, each with its index in `texts`.

        `max_chunks`: the most chunks of a text that is too long, whose score is their best; 0: none. `max_text_tokens`:
        the most tokens of each text that are read; 0: all.
        """

    @task_method("zero_shot_classification")
    def classify_zero_shot(
        self,
        model: str,
        text: str,
        candidate_labels: Iterable[str],
        *,
        hypothesis_template: str = "",
        multi_label: bool = False,
        truncation: "Truncation.ValueType" = Truncation.TRUNCATION_UNSPECIFIED,
        version: str = "",
    ) -> Sequence[LabelScore]:
        """Returns all candidate labels of a text, best first."""

    @task_method("zero_shot_token_classification")
    def find_entities_zero_shot(
        self,
        model: str,
        text: str,
        candidate_labels: Iterable[str],
        *,
        threshold: float = 0,
        allow_nested: bool = False,
        multi_label: bool = False,
        truncation: "Truncation.ValueType" = Truncation.TRUNCATION_UNSPECIFIED,
        version: str = "",
    ) -> Sequence[Entity]:
        """Returns the entities of a text for the candidate labels, whose scores exceed `threshold` (0: 0.5)."""

    @task_method("image_classification")
    def classify_image(
        self,
        model: str,
        image: bytes,
        *,
        top_k: int = 0,
        function: "ScoreFunction.ValueType" = ScoreFunction.SCORE_FUNCTION_UNSPECIFIED,
        version: str = "",
    ) -> Sequence[LabelScore]:
        """Returns the `top_k` labels (0: five, or all) of an image, best first.

        `image` is the bytes of a JPEG, PNG or WebP file.
        """

    @task_method("image_embedding")
    def embed_image(
        self, model: str, image: bytes, *, normalize: bool = True, dimensions: int = 0, version: str = ""
    ) -> NDArray[np.float32]:
        """Returns the vector of an image: float32 [dimensions, or the model's width].

        `image` is the bytes of a JPEG, PNG or WebP file.
        """

    @task_method("zero_shot_image_classification")
    def classify_image_zero_shot(
        self,
        model: str,
        image: bytes,
        candidate_labels: Iterable[str],
        *,
        hypothesis_template: str = "",
        truncation: "Truncation.ValueType" = Truncation.TRUNCATION_UNSPECIFIED,
        version: str = "",
    ) -> Sequence[LabelScore]:
        """Returns the candidate labels with their scores for an image, best first.

        `image` is the bytes of a JPEG, PNG or WebP file.
        """

    @task_method("text_generation")
    def generate_text(
        self,
        model: str,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        truncation: "Truncation.ValueType" = Truncation.TRUNCATION_UNSPECIFIED,
        version: str = "",
        **options: Unpack[GenerationFields],
    ) -> GeneratedText:
        """Returns the whole text that continues a prompt, or messages of a chat. `options` are the fields of
        GenerationOptions.

        `generate` returns the text in parts, and several texts.
        """

    @task_method("summarization")
    def summarize(
        self,
        model: str,
        text: str,
        *,
        truncation: "Truncation.ValueType" = Truncation.TRUNCATION_UNSPECIFIED,
        version: str = "",
        **options: Unpack[GenerationFields],
    ) -> GeneratedText:
        """Returns the summary of a text. `options` are the fields of GenerationOptions."""

    @task_method("translation")
    def translate(
        self,
        model: str,
        text: str,
        *,
        source_language: str = "",
        target_language: str = "",
        truncation: "Truncation.ValueType" = Truncation.TRUNCATION_UNSPECIFIED,
        version: str = "",
        **options: Unpack[GenerationFields],
    ) -> GeneratedText:
        """Returns the translation of a text; models of several languages need `target_language`.

        `options` are the fields of GenerationOptions.
        """

    @task_method("tokenization")
    def tokenize(
        self, model: str, text: str, *, skip_special_tokens: bool = False, version: str = ""
    ) -> Sequence[Token]:
        """Returns the tokens of a text, in its order."""

    @task_method("detokenization")
    def detokenize(
        self, model: str, token_ids: Iterable[int], *, skip_special_tokens: bool = False, version: str = ""
    ) -> str:
        """Returns the text of the tokens with these ids."""
