"""The HTTP API of text-embeddings-inference (TEI), for several models: a body, or ?model=, names the model."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any

from pydantic import Field

from neuronpipe.api.v1 import tasks_pb2 as tasks
from neuronpipe.core.errors import InvalidInput
from neuronpipe.doors.http.bodies import write_body
from neuronpipe.doors.http.body_types import Body, Count, Direction, Many, ModelBody, TextsOrTokens, texts_of
from neuronpipe.doors.http.exchange import Answers, HttpRequest, HttpResponse, Route, named
from neuronpipe.doors.http.problems import TEI_ERROR
from neuronpipe.doors.inference import (
    Inference,
    Inputs,
    ModelCall,
    check_second,
    of_results,
    score_function,
    truncation_of,
)
from neuronpipe.doors.tei import read_info
from neuronpipe.doors.vectors import embedding_input, listed, text_input, token_vectors, vector
from neuronpipe.gateway.requests import InferenceResult

_Texts = Annotated[str | Many[str], Field(description="a text, or several")]
_PromptName = Annotated[str | None, Field(description="a prompt of the model instead of its default prompt")]
_TEXTS_OR_PAIRS = "a text; a pair [text, text]; or several, each [text] or [text, text]"


class _TeiTruncated(Body):
    """Fields of most bodies. Without `truncate`, the setting long_texts decides."""

    truncate: bool | None = None
    truncation_direction: Direction | None = None

    @property
    def truncation(self) -> "tasks.Truncation.ValueType":
        """The value of both options in a tasks.TaskInput."""
        return truncation_of(self.truncate, self.truncation_direction)


class Embed(_TeiTruncated, ModelBody):
    inputs: TextsOrTokens
    normalize: bool = True
    dimensions: Count | None = None
    prompt_name: _PromptName = None


class EmbedSparse(_TeiTruncated, ModelBody):
    inputs: _Texts
    prompt_name: _PromptName = None


class EmbedAll(_TeiTruncated, ModelBody):
    inputs: _Texts


class Predict(_TeiTruncated, ModelBody):
    inputs: Annotated[str | Many[str] | Many[Many[str]], Field(description=_TEXTS_OR_PAIRS)]
    raw_scores: bool = False


class SimilarityInputs(Body):
    source_sentence: str
    sentences: Many[str]


class SimilarityParameters(_TeiTruncated): ...


class Similarity(ModelBody):
    inputs: SimilarityInputs
    parameters: SimilarityParameters = SimilarityParameters()


_PREDICTION: Any = named("Prediction", score=float, label=str)
_WEIGHT: Any = named("SparseValue", "A token of the vocabulary and its weight.", index=int, value=float)
_LIMITS = ("max_concurrent_requests", "max_input_length", "max_batch_tokens", "max_client_batch_size")
_UNKNOWN = ("max_batch_requests", "tokenization_workers", "sha", "docker_label")
_INFO = named(
    "Info",
    "The model and the limits. The pooling in `model_type` is a guess, because only the graph of a model knows it.",
    **dict.fromkeys(("model_id", "model_sha", "model_dtype", "version"), str),
    **dict.fromkeys(_LIMITS, int),
    **dict.fromkeys(_UNKNOWN),
    model_type=dict[str, Any],
    auto_truncate=bool,
)
_QUERY = {"model": "the model, where the body names none and several have the task"}
_post = partial(Route, "POST", error_form=TEI_ERROR, query=_QUERY)
EMBED = _post("/embed", "TEI: a vector for each text", Embed, list[list[float]])
EMBED_ALL = _post("/embed_all", "TEI: a vector for each token of each text", EmbedAll, list[list[list[float]]])
PREDICT = _post("/predict", "TEI: labels with scores, best first", Predict, list[_PREDICTION] | list[list[_PREDICTION]])
SIMILARITY = _post("/similarity", "TEI: cosines of a sentence and others", Similarity, list[float])
INFO = Route("GET", "/info", "TEI: the model and the limits", gives=_INFO, error_form=TEI_ERROR, query=_QUERY)
EMBED_SPARSE = _post("/embed_sparse", "TEI: a sparse vector for each text", EmbedSparse, list[list[_WEIGHT]])

_FIELDS = {**dict.fromkeys(("text", "text_pair", "token_ids"), "inputs…"), "truncation": "truncate"}
_SIMILARITY_FIELDS = {
    "source": "inputs.source_sentence",
    "texts": "inputs.sentences",
    "truncation": "parameters.truncate",
}


async def _embed(inference: Inference, request: HttpRequest) -> HttpResponse:
    body: Embed = request.body
    make = partial(
        embedding_input,
        skip_normalize=not body.normalize,
        dimensions=body.dimensions or 0,
        prompt_name=body.prompt_name or "",
        truncation=body.truncation,
    )
    return await _each(inference, request, "sentence_embedding", listed(body.inputs)[0], make=make, write=vector)


async def _embed_all(inference: Inference, request: HttpRequest) -> HttpResponse:
    body: EmbedAll = request.body
    make = partial(text_input, "feature_extraction", truncation=body.truncation)
    return await _each(inference, request, "feature_extraction", texts_of(body.inputs), make=make, write=token_vectors)


async def _embed_sparse(inference: Inference, request: HttpRequest) -> HttpResponse:
    body: EmbedSparse = request.body
    make = partial(text_input, "sparse_embedding", prompt_name=body.prompt_name or "", truncation=body.truncation)

    def write(result: tasks.SparseEmbeddingResult) -> Any:
        return [{"index": weight.token_id, "value": weight.weight} for weight in result.weights]

    return await _each(inference, request, "sparse_embedding", texts_of(body.inputs), make=make, write=write)


async def _predict(inference: Inference, request: HttpRequest) -> HttpResponse:
    body: Predict = request.body
    model = inference.choose(request.model(body.model), "text_classification")
    # A list of texts is one pair.
    is_list = isinstance(body.inputs, list) and not all(isinstance(text, str) for text in body.inputs)
    several: list[Any] = body.inputs if is_list else [texts_of(body.inputs)]  # type: ignore[assignment, arg-type]
    make_one = partial(
        text_input,
        "text_classification",
        top_k=len(inference.spec(model).labels),
        function=score_function(body.raw_scores),
        truncation=body.truncation,
    )

    def make(texts: list[str]) -> tasks.TaskInput:
        if len(texts) not in (1, 2):
            raise InvalidInput("text_pair", f"{len(texts)} texts, must be one or a pair")
        check_second("text_pair", texts[1:])
        return make_one(texts[0], text_pair="".join(texts[1:]))

    results = await inference.each(request.call, model, Inputs("inputs", several, make, _FIELDS, is_list))

    def write() -> Any:
        labels = [result.result.message.text_classification.labels for result in results]
        answers = [[{"score": label.score, "label": label.label} for label in scored] for scored in labels]
        return answers if is_list else answers[0]

    return await _answer(results, write)


async def _similarity(inference: Inference, request: HttpRequest) -> HttpResponse:
    body: Similarity = request.body
    model = inference.choose(request.model(body.model), "sentence_similarity")
    input = tasks.SentenceSimilarityInput(
        source=body.inputs.source_sentence, texts=body.inputs.sentences, truncation=body.parameters.truncation
    )
    model_call = ModelCall(request.call, model, _SIMILARITY_FIELDS)
    result = await inference.infer_one(model_call, tasks.TaskInput(sentence_similarity=input))
    return await _answer([result], lambda: list(result.result.message.sentence_similarity.scores))


async def _info(inference: Inference, request: HttpRequest) -> HttpResponse:
    """Answers GET /info. The pooling of `model_type` is a guess, because only the graph of a model knows it."""
    model, info = read_info(inference, request.model())
    labels = {str(index): label for index, label in enumerate(model.labels)}
    classes = {"id2label": labels, "label2id": {label: int(index) for index, label in labels.items()}}
    kinds: dict[str, dict[str, Any]] = {
        "sentence_embedding": {"embedding": {"pooling": "mean"}},  # a pooling that clients know
        "sparse_embedding": {"embedding": {"pooling": "splade"}},
        "text_classification": {"classifier": classes},
        "rerank": {"reranker": classes},
    }
    info |= {
        "model_type": kinds.get(model.task, {model.task: {}}),
        "max_client_batch_size": inference.settings.max_http_inputs,
        "auto_truncate": inference.settings.long_texts != "error",
        **dict.fromkeys(_UNKNOWN),
    }
    return HttpResponse(write_body(info))


async def _each(
    inference: Inference,
    request: HttpRequest,
    task: str,
    texts: Sequence[Any],
    make: Callable[[Any], tasks.TaskInput],
    write: Callable[[Any], Any],
) -> HttpResponse:
    """Answers with a list: `write` makes each element of the result of a text."""
    model = inference.choose(request.model(request.body.model), task)
    inputs = Inputs("inputs", texts, make, _FIELDS, is_list=texts is request.body.inputs)
    results = await inference.each(request.call, model, inputs)
    return await _answer(results, lambda: [write(getattr(result.result.message, task)) for result in results])


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


ANSWERS: Answers[Inference] = [
    (EMBED, _embed),
    (EMBED_ALL, _embed_all),
    (EMBED_SPARSE, _embed_sparse),
    (PREDICT, _predict),
    (SIMILARITY, _similarity),
    (INFO, _info),
]
