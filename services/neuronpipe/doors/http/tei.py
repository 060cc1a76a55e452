"""The HTTP API of text-embeddings-inference.

It serves one model; here a body's `model`, or ?model=, names one of several.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field

from neuronpipe import __version__
from neuronpipe.api.v1.models_pb2 import GetModelRequest
from neuronpipe.api.v1.tasks_pb2 import (
    DetokenizationInput,
    FeatureExtractionInput,
    ScoreFunction,
    SentenceSimilarityInput,
    SparseEmbeddingInput,
    TaskInput,
    TextClassificationInput,
    Token,
    TokenizationInput,
)
from neuronpipe.core.errors import InvalidInput
from neuronpipe.doors.http.bodies import (
    Body,
    Count,
    Direction,
    Many,
    TokenIds,
    Unsupported,
    texts_of,
    write_body,
    write_list,
)
from neuronpipe.doors.http.exchange import HttpHandler, HttpRequest, HttpResponse, Route
from neuronpipe.doors.http.problems import TEI_ERROR
from neuronpipe.doors.inference import Inference, ModelChoice, of_results, truncation_of
from neuronpipe.doors.vectors import embedding_input, listed, token_places, token_vectors, vector
from neuronpipe.gateway.catalog import Catalog
from neuronpipe.gateway.inference import InferenceResult
from neuronpipe.gateway.settings import PipelineSettings

Texts = Annotated[str | Many[str], Field(description="a text, or several")]
_TEXTS_OR_PAIRS = "a text; a pair [text, text]; or several, each [text] or [text, text]"


class _TeiBody(Body):
    """What all have. Without `truncate` a text that is too long is an error."""

    model: str | None = None
    truncate: bool | None = None
    truncation_direction: Direction | None = None


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


class SparseValue(Body):
    """A token of the vocabulary and its weight."""

    index: int
    value: float


class EmbedAll(_TeiBody):
    inputs: Texts
    prompt_name: Unsupported = None


class Predict(_TeiBody):
    inputs: Annotated[str | Many[str] | Many[Many[str]], Field(description=_TEXTS_OR_PAIRS)]
    raw_scores: bool = False
    prompt_name: Unsupported = None


class SimilarityInputs(Body):
    source_sentence: str
    sentences: Many[str]


class SimilarityParameters(Body):
    truncate: bool | None = None
    truncation_direction: Direction | None = None
    prompt_name: Unsupported = None


class Similarity(Body):
    model: str | None = None
    inputs: SimilarityInputs
    parameters: SimilarityParameters = SimilarityParameters()


class Tokenize(Body):
    model: str | None = None
    inputs: Annotated[str | Many[str], Field(description="a text, or several")]
    add_special_tokens: bool = True
    prompt_name: Unsupported = None


class Decode(Body):
    model: str | None = None
    ids: Annotated[TokenIds | Many[TokenIds], Field(description="the tokens of a text, or of several")]
    skip_special_tokens: bool = True


class TokenOfText(Body):
    """`start` and `stop`: the place in the text in bytes of UTF-8, null for a special token."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


class Prediction(Body):
    score: float
    label: str


class Info(Body):
    """`model_type` of a model of vectors has a pooling, which is not known here: it is a part of the graph."""

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
TOKENIZE = _post("/tokenize", "the tokens of each text", Tokenize, list[list[TokenOfText]])
DECODE = _post("/decode", "the text of each list of tokens", Decode, list[str])
ROUTES = (EMBED, EMBED_ALL, EMBED_SPARSE, PREDICT, SIMILARITY, INFO, TOKENIZE, DECODE)


def tei_handlers(
    inference: Inference, models: ModelChoice, catalog: Catalog, settings: PipelineSettings
) -> dict[str, HttpHandler]:
    """The handlers, by route."""

    async def each(
        request: HttpRequest, task: str, given: Sequence[Any], make: Callable[[Any], TaskInput], name: str = "inputs"
    ) -> list[InferenceResult]:
        model = models.choose(request.model(request.body.model), task)
        fields = partial(_fields, name, given is getattr(request.body, name))
        return await inference.each(request.call, model, given, make, name, fields)

    async def embed(request: HttpRequest) -> HttpResponse:
        body: Embed = request.body
        options: dict[str, Any] = {
            "skip_normalize": not body.normalize,
            "dimensions": body.dimensions or 0,
            "prompt_name": body.prompt_name or "",
            "truncation": truncation_of(body.truncate, body.truncation_direction),
        }
        texts = listed(body.inputs)[0]
        results = await each(request, "sentence_embedding", texts, partial(embedding_input, **options))
        return await _answer(results, lambda: [vector(one.result.message.sentence_embedding) for one in results])

    async def embed_all(request: HttpRequest) -> HttpResponse:
        body: EmbedAll = request.body
        truncation = truncation_of(body.truncate, body.truncation_direction)

        def make(text: str) -> TaskInput:
            return TaskInput(feature_extraction=FeatureExtractionInput(text=text, truncation=truncation))

        results = await each(request, "feature_extraction", texts_of(body.inputs), make)
        return await _answer(results, lambda: [token_vectors(one.result.message.feature_extraction) for one in results])

    async def predict(request: HttpRequest) -> HttpResponse:
        body: Predict = request.body
        model = models.choose(request.model(body.model), "text_classification")
        # A list of texts is one pair.
        is_list = isinstance(body.inputs, list) and not all(isinstance(one, str) for one in body.inputs)
        several: list[Any] = body.inputs if is_list else [texts_of(body.inputs)]  # type: ignore[assignment, arg-type]
        function = ScoreFunction.SCORE_FUNCTION_NONE if body.raw_scores else ScoreFunction.SCORE_FUNCTION_UNSPECIFIED

        def make(index: int) -> TaskInput:
            input = TextClassificationInput(
                **_pair(several[index], _place("inputs", is_list, index)),
                top_k=len(catalog.spec(*model).labels),
                function=function,
                truncation=truncation_of(body.truncate, body.truncation_direction),
            )
            return TaskInput(text_classification=input)

        fields = partial(_fields, "inputs", is_list)
        results = await inference.each(request.call, model, range(len(several)), make, "inputs", fields)

        def predictions() -> Any:
            labels = [one.result.message.text_classification.labels for one in results]
            several = [[{"score": one.score, "label": one.label} for one in scored] for scored in labels]
            return several if is_list else several[0]

        return await _answer(results, predictions)

    async def similarity(request: HttpRequest) -> HttpResponse:
        body: Similarity = request.body
        model = models.choose(request.model(body.model), "sentence_similarity")
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
        result = await inference.one(request.call, model, TaskInput(sentence_similarity=input), fields)
        return await _answer([result], lambda: list(result.result.message.sentence_similarity.scores))

    async def info(request: HttpRequest) -> HttpResponse:
        chosen = models.choose(request.model())
        model = catalog.get_model(GetModelRequest(**chosen._asdict())).model
        labels = {str(index): label for index, label in enumerate(model.labels)}
        classes = {"id2label": labels, "label2id": {label: int(index) for index, label in labels.items()}}
        kinds: dict[str, dict[str, Any]] = {
            "sentence_embedding": {"embedding": {"pooling": "mean"}},  # one that clients know
            "sparse_embedding": {"embedding": {"pooling": "splade"}},
            "text_classification": {"classifier": classes},
            "rerank": {"reranker": classes},
        }
        answer = {
            "model_id": model.name,
            "model_sha": model.digest,
            "model_dtype": model.dtype,
            "model_type": kinds.get(model.task, {model.task: {}}),
            "max_concurrent_requests": settings.max_requests_in_flight,
            "max_input_length": model.max_tokens,
            "max_batch_tokens": settings.max_tokens_in_flight,
            "max_client_batch_size": settings.max_http_inputs,
            "auto_truncate": False,
            "version": __version__,
            **dict.fromkeys(("max_batch_requests", "tokenization_workers", "sha", "docker_label")),
        }
        return HttpResponse(write_body(answer))

    async def embed_sparse(request: HttpRequest) -> HttpResponse:
        body: EmbedSparse = request.body
        truncation = truncation_of(body.truncate, body.truncation_direction)

        def make(text: str) -> TaskInput:
            input = SparseEmbeddingInput(text=text, prompt_name=body.prompt_name or "", truncation=truncation)
            return TaskInput(sparse_embedding=input)

        results = await each(request, "sparse_embedding", texts_of(body.inputs), make)

        def vectors() -> Any:
            answers = [one.result.message.sparse_embedding.weights for one in results]
            return [[{"index": one.token_id, "value": one.weight} for one in weights] for weights in answers]

        return await _answer(results, vectors)

    async def tokenize(request: HttpRequest) -> HttpResponse:
        body: Tokenize = request.body
        texts = texts_of(body.inputs)

        def make(text: str) -> TaskInput:
            input = TokenizationInput(text=text, skip_special_tokens=not body.add_special_tokens)
            return TaskInput(tokenization=input)

        results = await each(request, "tokenization", texts, make)

        def token_list(text: str, tokens: Sequence[Token]) -> Iterator[dict[str, Any]]:
            for token, (start, stop) in zip(tokens, token_places(text, tokens), strict=True):
                yield {
                    "id": token.token_id,
                    "text": token.text,
                    "special": token.is_special,
                    "start": start,
                    "stop": stop,
                }

        def write() -> bytes:
            several = [one.result.message.tokenization.tokens for one in results]
            return write_body([write_list(token_list(*one)) for one in zip(texts, several, strict=True)])

        return HttpResponse(await of_results(results, write))

    async def decode(request: HttpRequest) -> HttpResponse:
        body: Decode = request.body
        several: Any = body.ids if body.ids and isinstance(body.ids[0], list) else [body.ids]

        def make(ids: list[int]) -> TaskInput:
            input = DetokenizationInput(token_ids=ids, skip_special_tokens=body.skip_special_tokens)
            return TaskInput(detokenization=input)

        results = await each(request, "detokenization", several, make, "ids")
        return HttpResponse(write_body([one.result.message.detokenization.text for one in results]))

    return {
        EMBED.key: embed,
        EMBED_ALL.key: embed_all,
        EMBED_SPARSE.key: embed_sparse,
        PREDICT.key: predict,
        SIMILARITY.key: similarity,
        INFO.key: info,
        TOKENIZE.key: tokenize,
        DECODE.key: decode,
    }


def _pair(texts: list[str], path: str) -> dict[str, Any]:
    if len(texts) not in (1, 2):
        raise InvalidInput(path, f"{len(texts)} texts, must be one or a pair")
    return dict(zip(("text", "text_pair"), texts, strict=False))


def _place(name: str, is_list: bool, index: int) -> str:
    return f"{name}[{index}]" if is_list else name


def _fields(name: str, is_list: bool, index: int) -> dict[str, str]:
    place = _place(name, is_list, index)
    return dict.fromkeys(("text", "text_pair", "token_ids"), place) | {"truncation": "truncate"}


async def _answer(results: list[InferenceResult], make: Callable[[], Any]) -> HttpResponse:
    """What is made of results, with TEI's headers: tokens, and times in milliseconds, of several inputs those of the
    slowest.
    """
    slowest = max(results, key=lambda one: one.timings.total_ns).timings
    headers = {
        b"x-compute-tokens": sum(one.usage.tokens for one in results),
        b"x-total-time": slowest.total_ns // 1_000_000,
        b"x-tokenization-time": slowest.preprocess_ns // 1_000_000,
        b"x-queue-time": slowest.predict_queue_ns // 1_000_000,
        b"x-inference-time": slowest.predict_compute_ns // 1_000_000,
    }
    body = await of_results(results, lambda: write_body(make()))
    return HttpResponse(body, headers=[(name, b"%d" % number) for name, number in headers.items()])
