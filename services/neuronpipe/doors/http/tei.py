"""The HTTP API of text-embeddings-inference (TEI).

TEI serves one model; here `model` in a body, or ?model=, names a model.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field

from neuronpipe import __version__
from neuronpipe.api.v1.models_pb2 import GetModelRequest
from neuronpipe.api.v1.tasks_pb2 import (
    FeatureExtractionInput,
    ScoreFunction,
    SentenceSimilarityInput,
    SparseEmbeddingInput,
    TaskInput,
    TaskResult,
    TextClassificationInput,
    Truncation,
)
from neuronpipe.core.errors import InvalidInput
from neuronpipe.doors.http.bodies import (
    Answer,
    Body,
    Count,
    Direction,
    Many,
    TokenIds,
    texts_of,
    write_body,
)
from neuronpipe.doors.http.exchange import HttpHandlers, HttpRequest, HttpResponse, Route
from neuronpipe.doors.http.problems import TEI_ERROR
from neuronpipe.doors.inference import Inference, ModelChoice, check_second, of_results, truncation_of
from neuronpipe.doors.vectors import embedding_input, listed, token_vectors, vector
from neuronpipe.gateway.catalog import Catalog
from neuronpipe.gateway.inference import InferenceResult
from neuronpipe.gateway.settings import PipelineSettings

Texts = Annotated[str | Many[str], Field(description="a text, or several")]
_TEXTS_OR_PAIRS = "a text; a pair [text, text]; or several, each [text] or [text, text]"


class _TeiBody(Body):
    """Fields of every body. Without `truncate`, a text that is too long is an error."""

    model: str | None = None
    truncate: bool | None = None
    truncation_direction: Direction | None = None

    @property
    def truncation(self) -> "Truncation.ValueType":
        """Both options as the value of a TaskInput."""
        return truncation_of(self.truncate, self.truncation_direction)


class Embed(_TeiBody):
    inputs: Annotated[
        str | Many[str] | TokenIds | Many[TokenIds],
        Field(description="a text, or several; or instead of each the ids of the model's own tokenizer"),
    ]
    normalize: bool = True
    dimensions: Count | None = None
    prompt_name: str | None = Field(None, description="one of the model's prompts instead of its default")


class EmbedSparse(_TeiBody):
    inputs: Texts
    prompt_name: str | None = Field(None, description="one of the model's prompts instead of its default")


class SparseValue(Answer):
    """A token of the vocabulary and its weight."""

    index: int
    value: float


class EmbedAll(_TeiBody):
    inputs: Texts


class Predict(_TeiBody):
    inputs: Annotated[str | Many[str] | Many[Many[str]], Field(description=_TEXTS_OR_PAIRS)]
    raw_scores: bool = False


class SimilarityInputs(Body):
    source_sentence: str
    sentences: Many[str]


class SimilarityParameters(Body):
    truncate: bool | None = None
    truncation_direction: Direction | None = None


class Similarity(Body):
    model: str | None = None
    inputs: SimilarityInputs
    parameters: SimilarityParameters = SimilarityParameters()


class Prediction(Answer):
    score: float
    label: str


class Info(Answer):
    """The model and the limits. The pooling in `model_type` is a guess, because only the graph of a model knows it."""

    model_id: str
    model_sha: str
    model_dtype: str
    model_type: dict[str, Any]
    max_concurrent_requests: int
    max_input_length: int
    max_batch_tokens: int
    max_batch_requests: None
    max_client_batch_size: int
    auto_truncate: Literal[False]
    tokenization_workers: None
    version: str
    sha: None
    docker_label: None


_MODEL_PARAMETER = {"model": "the model, where the body names none and several have the task"}


def _post(path: str, summary: str, takes: Any, gives: Any) -> Route:
    return Route("POST", path, f"TEI: {summary}", takes, gives, TEI_ERROR, query=_MODEL_PARAMETER)


EMBED = _post("/embed", "a vector for each text", Embed, list[list[float]])
EMBED_ALL = _post("/embed_all", "a vector for each token of each text", EmbedAll, list[list[list[float]]])
PREDICT = _post("/predict", "labels with scores, best first", Predict, list[Prediction] | list[list[Prediction]])
SIMILARITY = _post("/similarity", "cosines of a sentence and others", Similarity, list[float])
INFO = Route("GET", "/info", "TEI: the model and the limits", gives=Info, error_form=TEI_ERROR, query=_MODEL_PARAMETER)
EMBED_SPARSE = _post("/embed_sparse", "a sparse vector for each text", EmbedSparse, list[list[SparseValue]])


class TeiHttpDoor:
    """Converts TEI's bodies to calls of the pipeline and back."""

    def __init__(self, inference: Inference, models: ModelChoice, catalog: Catalog, settings: PipelineSettings) -> None:
        self._inference = inference
        self._models = models
        self._catalog = catalog
        self._settings = settings

    def handlers(self) -> HttpHandlers:
        """The routes with their handlers."""
        return [
            (EMBED, self.embed),
            (EMBED_ALL, self.embed_all),
            (EMBED_SPARSE, self.embed_sparse),
            (PREDICT, self.predict),
            (SIMILARITY, self.similarity),
            (INFO, self.info),
        ]

    async def embed(self, request: HttpRequest) -> HttpResponse:
        """POST /embed."""
        body: Embed = request.body
        options: dict[str, Any] = {
            "skip_normalize": not body.normalize,
            "dimensions": body.dimensions or 0,
            "prompt_name": body.prompt_name or "",
            "truncation": body.truncation,
        }
        texts = listed(body.inputs)[0]
        results = await self._each(request, "sentence_embedding", texts, partial(embedding_input, **options))
        return await _answer(results, lambda: [vector(one.sentence_embedding) for one in _messages(results)])

    async def embed_all(self, request: HttpRequest) -> HttpResponse:
        """POST /embed_all."""
        body: EmbedAll = request.body

        def make(text: str) -> TaskInput:
            return TaskInput(feature_extraction=FeatureExtractionInput(text=text, truncation=body.truncation))

        results = await self._each(request, "feature_extraction", texts_of(body.inputs), make)
        return await _answer(results, lambda: [token_vectors(one.feature_extraction) for one in _messages(results)])

    async def embed_sparse(self, request: HttpRequest) -> HttpResponse:
        """POST /embed_sparse."""
        body: EmbedSparse = request.body

        def make(text: str) -> TaskInput:
            input = SparseEmbeddingInput(text=text, prompt_name=body.prompt_name or "", truncation=body.truncation)
            return TaskInput(sparse_embedding=input)

        def vectors() -> Any:
            answers = [message.sparse_embedding.weights for message in _messages(results)]
            return [[{"index": token.token_id, "value": token.weight} for token in weights] for weights in answers]

        results = await self._each(request, "sparse_embedding", texts_of(body.inputs), make)
        return await _answer(results, vectors)

    async def predict(self, request: HttpRequest) -> HttpResponse:
        """POST /predict."""
        body: Predict = request.body
        model = self._models.choose(request.model(body.model), "text_classification")
        # A list of texts is one pair.
        is_list = isinstance(body.inputs, list) and not all(isinstance(text, str) for text in body.inputs)
        several: list[Any] = body.inputs if is_list else [texts_of(body.inputs)]  # type: ignore[assignment, arg-type]
        function = ScoreFunction.SCORE_FUNCTION_NONE if body.raw_scores else ScoreFunction.SCORE_FUNCTION_UNSPECIFIED

        def make(index: int) -> TaskInput:
            input = TextClassificationInput(
                **_pair(several[index], _place("inputs", is_list, index)),
                top_k=len(self._catalog.spec(*model).labels),
                function=function,
                truncation=body.truncation,
            )
            return TaskInput(text_classification=input)

        def predictions() -> Any:
            labels = [message.text_classification.labels for message in _messages(results)]
            answers = [[{"score": label.score, "label": label.label} for label in scored] for scored in labels]
            return answers if is_list else answers[0]

        fields = partial(_fields, "inputs", is_list)
        results = await self._inference.each(request.call, model, range(len(several)), make, "inputs", fields)
        return await _answer(results, predictions)

    async def similarity(self, request: HttpRequest) -> HttpResponse:
        """POST /similarity."""
        body: Similarity = request.body
        model = self._models.choose(request.model(body.model), "sentence_similarity")
        input = SentenceSimilarityInput(
            source=body.inputs.source_sentence,
            texts=body.inputs.sentences,
            truncation=truncation_of(body.parameters.truncate, body.parameters.truncation_direction),
        )
        fields = {
            "source": "inputs.source_sentence",
            "texts": "inputs.sentences",
            "truncation": "parameters.truncate",
        }
        result = await self._inference.one(request.call, model, TaskInput(sentence_similarity=input), fields)
        return await _answer([result], lambda: list(result.result.message.sentence_similarity.scores))

    async def info(self, request: HttpRequest) -> HttpResponse:
        """GET /info."""
        chosen = self._models.choose(request.model())
        model = self._catalog.get_model(GetModelRequest(**chosen._asdict())).model
        labels = {str(index): label for index, label in enumerate(model.labels)}
        classes = {"id2label": labels, "label2id": {label: int(index) for index, label in labels.items()}}
        kinds: dict[str, dict[str, Any]] = {
            "sentence_embedding": {"embedding": {"pooling": "mean"}},  # a pooling that clients know
            "sparse_embedding": {"embedding": {"pooling": "splade"}},
            "text_classification": {"classifier": classes},
            "rerank": {"reranker": classes},
        }
        answer = {
            "model_id": model.name,
            "model_sha": model.digest,
            "model_dtype": model.dtype,
            "model_type": kinds.get(model.task, {model.task: {}}),
            "max_concurrent_requests": self._settings.max_requests_in_flight,
            "max_input_length": model.max_tokens,
            "max_batch_tokens": self._settings.max_tokens_in_flight,
            "max_client_batch_size": self._settings.max_http_inputs,
            "auto_truncate": False,
            "version": __version__,
            **dict.fromkeys(("max_batch_requests", "tokenization_workers", "sha", "docker_label")),
        }
        return HttpResponse(write_body(answer))

    async def _each(
        self, request: HttpRequest, task: str, given: Sequence[Any], make: Callable[[Any], TaskInput]
    ) -> list[InferenceResult]:
        model = self._models.choose(request.model(request.body.model), task)
        fields = partial(_fields, "inputs", given is request.body.inputs)
        return await self._inference.each(request.call, model, given, make, "inputs", fields)


def _messages(results: Sequence[InferenceResult]) -> list[TaskResult]:
    return [result.result.message for result in results]


def _pair(texts: list[str], path: str) -> dict[str, Any]:
    if len(texts) not in (1, 2):
        raise InvalidInput(path, f"{len(texts)} texts, must be one or a pair")
    check_second(path, texts[1:])
    return dict(zip(("text", "text_pair"), texts, strict=False))


def _place(name: str, is_list: bool, index: int) -> str:
    return f"{name}[{index}]" if is_list else name


def _fields(name: str, is_list: bool, index: int) -> dict[str, str]:
    place = _place(name, is_list, index)
    return dict.fromkeys(("text", "text_pair", "token_ids"), place) | {"truncation": "truncate"}


async def _answer(results: list[InferenceResult], make: Callable[[], Any]) -> HttpResponse:
    """Writes results with TEI's headers: tokens of all inputs, and the times of the slowest input in milliseconds."""
    slowest = max(results, key=lambda result: result.timings.total_ns).timings
    headers = {
        b"x-compute-tokens": sum(result.usage.tokens for result in results),
        b"x-total-time": slowest.total_ns // 1_000_000,
        b"x-tokenization-time": slowest.preprocess_ns // 1_000_000,
        b"x-queue-time": slowest.predict_queue_ns // 1_000_000,
        b"x-inference-time": slowest.predict_compute_ns // 1_000_000,
    }
    body = await of_results(results, lambda: write_body(make()))
    return HttpResponse(body, headers=[(name, b"%d" % number) for name, number in headers.items()])
