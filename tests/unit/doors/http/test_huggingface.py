"""doors/http/huggingface.py and huggingface_tasks.py: each task's JSON, and which task a body is for."""

from base64 import b64encode
from typing import Any

import pytest

from neuronpipe.api.v1.tasks_pb2 import (
    Aggregation,
    FilledMask,
    LabelScore,
    MultiVectorEmbeddingInput,
    ScoreFunction,
    SparseEmbeddingInput,
    TaskInput,
    TaskResult,
    TokenScore,
    Truncation,
)
from neuronpipe.core.errors import InvalidInput, NeuronpipeError
from neuronpipe.doors.http.huggingface_tasks import CONVERTERS
from neuronpipe.tasks import TASKS
from tests.unit.doors.http.written_pipeline import Browser
from tests.unit.model_specs import image_spec, model_spec
from tests.unit.task_messages import task_input, task_result

_UNSET, _UNCUT, _RIGHT = (Truncation.TRUNCATION_UNSPECIFIED, Truncation.TRUNCATION_ERROR, Truncation.TRUNCATION_RIGHT)
_LEFT = Truncation.TRUNCATION_LEFT
_NONE = Aggregation.AGGREGATION_NONE
_SIGMOID, _RAW = ScoreFunction.SCORE_FUNCTION_SIGMOID, ScoreFunction.SCORE_FUNCTION_NONE
_LABELS = [LabelScore(label="b", score=0.75), LabelScore(label="a", score=0.25)]
_WRITTEN_LABELS = [{"label": "b", "score": 0.75}, {"label": "a", "score": 0.25}]
_MASK = FilledMask(tokens=[TokenScore(token="sat", score=0.5, token_id=7)], start=4, end=7)
_SECOND_MASK = FilledMask(tokens=[TokenScore(token="on", score=0.25, token_id=8)], start=8, end=11)

_RESULTS: dict[str, dict[str, Any]] = {
    "summarization": {"sequences": [{"text": "short"}]},
    "translation": {"sequences": [{"text": "court"}]},
    "text_classification": {"labels": _LABELS},
    "image_classification": {"labels": _LABELS},
    "image_embedding": {"embedding": [1, 2]},
    "zero_shot_image_classification": {"labels": _LABELS},
    "zero_shot_classification": {"labels": _LABELS},
    "zero_shot_token_classification": {
        "entities": [{"label": "PER", "score": 0.5, "text": "Ann", "start": 1, "end": 4}]
    },
    "token_classification": {"entities": [{"label": "PER", "score": 0.5, "text": "Ann", "start": 1, "end": 4}]},
    "fill_mask": {"masks": [_MASK]},
    "question_answering": {"answers": [{"text": "a cat", "score": 0.5, "start": 1, "end": 6}]},
    "sentence_embedding": {"embedding": [1, 2]},
    "feature_extraction": {"data": bytes.fromhex("0000803f00000040"), "shape": [2, 1]},  # 1.0 and 2.0
    "sparse_embedding": {"weights": [{"token_id": 7, "weight": 1.5, "token": "a"}]},
    "multi_vector_embedding": {"data": bytes.fromhex("0000803f00000040"), "shape": [1, 2]},
    "sentence_similarity": {"scores": [0.5, 1]},
    "rerank": {"texts": [{"index": 1, "score": 0.5}, {"index": 0, "score": 0.25}]},
}


def _answer(input: TaskInput) -> TaskResult | NeuronpipeError:
    task = str(input.WhichOneof("task"))
    return task_result(**{task: _RESULTS[task]})


_SPECS = [
    model_spec(name="labels"),
    model_spec("zero_shot_classification", name="entailer", labels=tuple("xyz"), also_answers=("text_classification",)),
    model_spec("summarization", name="shortener", decoder_start_token_ids=(2,), max_text_tokens=9),
    model_spec("translation", name="translator", languages={"fr": 5}, decoder_start_token_ids=(2,), max_text_tokens=9),
    model_spec("token_classification", name="tagger"),
    model_spec("fill_mask", name="filler"),
    model_spec("question_answering", name="answerer"),
    model_spec("sentence_embedding", name="embedder", also_answers=("sentence_similarity",)),
    model_spec("feature_extraction", name="extractor"),
    model_spec("rerank", name="reranker"),
    model_spec("sparse_embedding", name="weights"),
    model_spec("multi_vector_embedding", name="late"),
    image_spec(name="viewer"),
    image_spec("image_embedding", name="seer"),
    image_spec("zero_shot_image_classification", name="chooser", vocabulary_size=9),
    model_spec("zero_shot_token_classification", name="finder"),
]


@pytest.fixture
def browser() -> Browser:
    return Browser(_SPECS, _answer)


def test_every_task_has_its_json() -> None:
    assert set(CONVERTERS) == set(TASKS)


_QUESTION = {"question": "q", "context": "c"}
_WINDOWED = {"max_answer_len": 5, "doc_stride": 2, "handle_impossible_answer": True, "align_to_words": True}
_HYPOTHESES = {"candidate_labels": ["b", "a"], "multi_label": True, "hypothesis_template": "{}!"}
_SPANS = {"candidate_labels": ["a"], "threshold": 0.25, "multi_label": True}
_CASES: list[tuple[str, dict[str, Any], TaskInput, Any]] = [
    (
        "shortener",
        {"inputs": "t", "parameters": {"truncation": "only_first", "generate_parameters": {"num_beams": 2}}},
        task_input(summarization={"text": "t", "options": {"num_beams": 2}, "truncation": _RIGHT}),
        [{"summary_text": "short"}],
    ),
    (
        "translator",
        {"inputs": "t", "parameters": {"tgt_lang": "fr"}},
        task_input(translation={"text": "t", "target_language": "fr", "options": {}}),
        [{"translation_text": "court"}],
    ),
    (
        "labels",
        {"inputs": "t", "parameters": {"top_k": 9, "function_to_apply": "sigmoid"}},
        task_input(text_classification={"text": "t", "top_k": 3, "function": _SIGMOID, "truncation": _UNSET}),
        [_WRITTEN_LABELS],
    ),
    (
        "labels",
        {"inputs": {"text": "t", "text_pair": "p"}, "parameters": {"truncation": True}},
        task_input(text_classification={"text": "t", "text_pair": "p", "top_k": 3, "truncation": _RIGHT}),
        [_WRITTEN_LABELS],
    ),
    (
        "entailer",
        {"inputs": "t", "parameters": _HYPOTHESES},
        task_input(zero_shot_classification={"text": "t", **_HYPOTHESES, "truncation": _UNSET}),
        _WRITTEN_LABELS,
    ),
    (
        "tagger",
        {"inputs": "t", "parameters": {"aggregation_strategy": "max", "ignore_labels": ["X"], "stride": 3}},
        task_input(
            token_classification={
                "truncation": _UNSET,
                "text": "t",
                "aggregation": Aggregation.AGGREGATION_MAX,
                "ignore_labels": ["X"],
                "window_stride_tokens": 3,
            }
        ),
        [{"entity_group": "PER", "score": 0.5, "word": "Ann", "start": 1, "end": 4}],
    ),
    (
        "tagger",
        {"inputs": "t", "parameters": {"aggregation_strategy": "none", "ignore_labels": []}},
        task_input(
            token_classification={"truncation": _UNSET, "text": "t", "aggregation": _NONE, "keep_all_labels": True}
        ),
        [{"entity": "PER", "score": 0.5, "word": "Ann", "start": 1, "end": 4}],
    ),
    (
        "filler",
        {"inputs": "cat [M] [M]", "parameters": {"top_k": 1, "targets": ["sat"]}},
        task_input(fill_mask={"truncation": _UNSET, "text": "cat [M] [M]", "top_k": 1, "targets": ["sat"]}),
        [{"score": 0.5, "token": 7, "token_str": "sat", "sequence": "cat sat [M]"}],
    ),
    (
        "answerer",
        {"inputs": _QUESTION, "parameters": _WINDOWED},
        task_input(
            question_answering={**_QUESTION, "max_answer_tokens": 5, "window_stride_tokens": 2, "allow_no_answer": True}
        ),
        {"answer": "a cat", "score": 0.5, "start": 1, "end": 6},
    ),
    (
        "answerer",
        {"inputs": _QUESTION, "parameters": {"top_k": 2}},
        task_input(question_answering={"question": "q", "context": "c", "top_k": 2}),
        [{"answer": "a cat", "score": 0.5, "start": 1, "end": 6}],
    ),
    (
        "embedder",
        {"inputs": "t", "normalize": False, "dimensions": 2, "truncate": True, "truncation_direction": "Left"},
        task_input(sentence_embedding={"text": "t", "skip_normalize": True, "dimensions": 2, "truncation": _LEFT}),
        [1.0, 2.0],
    ),
    (
        "embedder",
        {"inputs": {"source_sentence": "s", "sentences": ["a", "b"]}},
        task_input(sentence_similarity={"truncation": _UNSET, "source": "s", "texts": ["a", "b"]}),
        [0.5, 1.0],
    ),
    (
        "reranker",
        {"inputs": {"query": "q", "texts": ["a", "b"]}, "parameters": {"top_k": 9, "function_to_apply": "none"}},
        task_input(rerank={"query": "q", "texts": ["a", "b"], "top_n": 2, "function": _RAW, "truncation": _UNSET}),
        [{"index": 1, "score": 0.5}, {"index": 0, "score": 0.25}],
    ),
    (
        "viewer",
        {"inputs": b64encode(b"an image").decode(), "parameters": {"top_k": 2}},
        task_input(image_classification={"image": b"an image", "top_k": 2}),
        _WRITTEN_LABELS,
    ),
    ("seer", {"inputs": b64encode(b"an image").decode()}, task_input(image_embedding={"image": b"an image"}), [1, 2]),
    (
        "chooser",
        {"inputs": b64encode(b"an image").decode(), "parameters": {"candidate_labels": ["a", "b"]}},
        task_input(
            zero_shot_image_classification={"truncation": _UNSET, "image": b"an image", "candidate_labels": ["a", "b"]}
        ),
        _WRITTEN_LABELS,
    ),
    (
        "finder",
        {"inputs": "a text", "parameters": {**_SPANS, "flat_ner": False}},
        task_input(
            zero_shot_token_classification={"text": "a text", **_SPANS, "allow_nested": True, "truncation": _UNSET}
        ),
        [{"entity_group": "PER", "score": 0.5, "word": "Ann", "start": 1, "end": 4}],
    ),
]


@pytest.mark.parametrize(("model", "body", "input", "answer"), _CASES)
async def test_a_body_becomes_an_input_and_a_result_json(
    browser: Browser, model: str, body: dict[str, Any], input: TaskInput, answer: Any
) -> None:
    assert await browser.post(f"/models/{model}", body) == (200, answer)
    assert browser.inputs == [input]
    assert browser.pipeline.asked[0].model == model


async def test_token_vectors_are_lists_of_lists(browser: Browser) -> None:
    assert await browser.post("/models/extractor", {"inputs": "t"}) == (200, [[1.0], [2.0]])
    body = {"inputs": "t", "prompt_name": "query"}
    assert await browser.post("/models/weights", body) == (200, [{"index": 7, "value": 1.5, "token": "a"}])
    assert await browser.post("/pipeline/feature-extraction/late", body) == (200, [[1.0, 2.0]])
    _, sparse, late = browser.inputs
    assert sparse.sparse_embedding == SparseEmbeddingInput(text="t", prompt_name="query", truncation=_UNSET)
    assert late.multi_vector_embedding == MultiVectorEmbeddingInput(text="t", is_query=True, truncation=_UNSET)
    assert await browser.post("/models/extractor", {"inputs": ["t", "u"]}) == (200, [[[1.0], [2.0]], [[1.0], [2.0]]])


async def test_many_masks_are_a_list_each(browser: Browser) -> None:
    result = task_result(fill_mask={"masks": [_MASK, _SECOND_MASK]})
    browser = Browser(_SPECS, lambda given: result)
    _, answer = await browser.post("/models/filler", {"inputs": "cat [M] [M]"})
    assert [[guess["sequence"] for guess in mask] for mask in answer] == [["cat sat [M]"], ["cat [M] on"]]


async def test_many_inputs_have_a_list_of_answers(browser: Browser) -> None:
    assert await browser.post("/models/labels", {"inputs": ["a", "b"]}) == (200, [_WRITTEN_LABELS, _WRITTEN_LABELS])
    questions = [_QUESTION] * 2
    _, answers = await browser.post("/models/answerer", {"inputs": questions})
    assert [answer["answer"] for answer in answers] == ["a cat", "a cat"]


@pytest.mark.parametrize("media_type", ["image/png", "image/jpeg", "image/webp", "application/octet-stream", ""])
async def test_an_image_may_be_the_body_itself(browser: Browser, media_type: str) -> None:
    assert await browser.post("/models/viewer", b"\x89PNG", media_type) == (200, _WRITTEN_LABELS)
    assert browser.inputs == [task_input(image_classification={"image": b"\x89PNG"})]


async def test_an_image_for_a_model_of_texts_is_refused(browser: Browser) -> None:
    status, body = await browser.post("/models/labels", b"\x89PNG", "image/png")
    assert (status, body["error"]) == (400, "content-type: must be application/json; model 'labels' takes no images")


@pytest.mark.parametrize(
    "path", ["/models/embedder/pipeline/feature-extraction", "/pipeline/feature-extraction/embedder"]
)
async def test_the_path_may_name_the_task(browser: Browser, path: str) -> None:
    assert await browser.post(path, {"inputs": "t"}) == (200, [1.0, 2.0])


async def test_a_task_of_the_path_that_the_model_does_not_have_is_refused(browser: Browser) -> None:
    status, body = await browser.post("/pipeline/fill-mask/embedder", {"inputs": "t"})
    assert status == 400
    assert body["error"].endswith("it has: feature-extraction, sentence-similarity")


async def test_the_root_is_an_endpoint_of_one_model() -> None:
    browser = Browser(_SPECS, _answer, default_models="labels")
    assert await browser.post("/", {"inputs": "t"}) == (200, [_WRITTEN_LABELS])
    assert await browser.post("/?model=embedder", {"inputs": "t"}) == (200, [1.0, 2.0])


@pytest.mark.parametrize(
    ("model", "body", "error"),
    [
        ("labels", {}, "inputs: is missing"),
        ("labels", [], "body: must be an object"),
        ("labels", {"inputs": "t", "parameters": {"top_k": "1"}}, "parameters.top_k: must be a whole number"),
        ("entailer", {"inputs": "t"}, "parameters: is missing"),
        ("answerer", {"inputs": {"question": "q"}}, "inputs.context: is missing"),
        ("answerer", {"inputs": _QUESTION, "parameters": {"max_seq_len": 9}}, "is not supported"),
        ("extractor", {"inputs": "t", "prompt_name": "query"}, "prompt_name: is for models of sentence embeddings"),
        ("late", {"inputs": "t", "prompt_name": "other"}, "prompt_name: must be query or document for a model of late"),
        ("extractor", {"inputs": "t", "dimensions": 3}, "dimensions: is for models of sentence embeddings"),
        ("viewer", {"inputs": "no base64!"}, "inputs: is no Base64"),
        ("unknown", {"inputs": "t"}, "model 'unknown' is not served"),
    ],
)
async def test_what_is_wrong_is_named(browser: Browser, model: str, body: Any, error: str) -> None:
    status, answer = await browser.post(f"/models/{model}", body)
    assert status in (400, 404)
    assert error in answer["error"]
    assert browser.inputs == []


_RANKED = {"query": "q", "texts": ["a"]}
_TOO_LONG = InvalidInput("text", "9 tokens; set truncation to cut", ["truncation"])


@pytest.mark.parametrize(
    ("model", "body", "error", "told"),
    [
        ("labels", {"inputs": "t"}, InvalidInput("text", "is long"), "inputs: is long"),
        ("labels", {"inputs": ["t"]}, InvalidInput("text", "is long"), "inputs[0]: is long"),
        ("reranker", {"inputs": _RANKED}, InvalidInput("texts[0]", "is long"), "inputs.texts[0]: is long"),
        ("answerer", {"inputs": _QUESTION}, InvalidInput("question", "is long"), "inputs.question: is long"),
        ("filler", {"inputs": "t"}, InvalidInput("targets[1]", "is none"), "parameters.targets[1]: is none"),
        (
            "tagger",
            {"inputs": ["t"]},
            InvalidInput(
                "text",
                "9 tokens; set truncation to cut, or window_stride_tokens to read all of it",
                ["truncation", "window_stride_tokens"],
            ),
            "inputs[0]: 9 tokens; set parameters.truncation to cut, or parameters.stride to read all of it",
        ),
        (
            "embedder",
            {"inputs": {"source_sentence": "s", "sentences": ["t"]}},
            InvalidInput("texts[0]", "9 tokens; set truncation to cut", ["truncation"]),
            "inputs.sentences[0]: 9 tokens; set parameters.truncation to cut",
        ),
        ("embedder", {"inputs": "t"}, _TOO_LONG, "inputs: 9 tokens; set truncate to cut"),
        (
            "embedder",
            {"inputs": "t", "parameters": {"truncation": False}},
            _TOO_LONG,
            "inputs: 9 tokens; set parameters.truncation to cut",
        ),
    ],
)
async def test_pipeline_errors_name_the_bodys_field(model: str, body: Any, error: NeuronpipeError, told: str) -> None:
    browser = Browser(_SPECS, lambda given: error)
    assert await browser.post(f"/models/{model}", body) == (400, {"error": told, "error_type": "validation"})


def test_what_can_be_cut_has_a_field_for_it() -> None:
    can_cut = {name for name in CONVERTERS if hasattr(getattr(TaskInput(), name), "truncation")}
    assert can_cut == {name for name, converter in CONVERTERS.items() if "truncation" in converter.fields}


_CUT_BODIES: dict[str, Any] = {
    "labels": "t",
    "tagger": "t",
    "filler": "t",
    "extractor": "t",
    "weights": "t",
    "late": "t",
    "embedder": {"source_sentence": "s", "sentences": ["t"]},
    "reranker": {"query": "q", "texts": ["t"]},
    "shortener": "t",
}


@pytest.mark.parametrize(
    ("given", "expected"),
    [(True, _RIGHT), ("longest_first", _RIGHT), (False, _UNCUT), ("do_not_truncate", _UNCUT), (None, _UNSET)],
)
@pytest.mark.parametrize("model", _CUT_BODIES)
async def test_truncation_is_as_in_the_pipelines(browser: Browser, model: str, given: Any, expected: int) -> None:
    body = {"inputs": _CUT_BODIES[model], "parameters": {"truncation": given}}
    assert (await browser.post(f"/models/{model}", body))[0] == 200
    [input] = browser.inputs
    assert getattr(input, str(input.WhichOneof("task"))).truncation == expected


async def test_a_pair_has_two_texts(browser: Browser) -> None:
    body = {"inputs": ["a", {"text": "a", "text_pair": ""}]}
    status, answer = await browser.post("/models/labels", body)
    assert (status, answer["error"]) == (400, "inputs: the second text is empty; send the first one alone, or a text")


async def test_of_a_pair_the_longer_text_is_cut(browser: Browser) -> None:
    body = {"inputs": {"text": "a", "text_pair": "b"}, "parameters": {"truncation": "only_first"}}
    _, answer = await browser.post("/models/labels", body)
    assert answer["error"] == "parameters.truncation: only_first is not supported for pairs; use longest_first"


async def test_labels_in_one_text_have_no_empty_one(browser: Browser) -> None:
    await browser.post("/models/entailer", {"inputs": "t", "parameters": {"candidate_labels": "a, b, "}})
    assert list(browser.inputs[0].zero_shot_classification.candidate_labels) == ["a", "b"]


async def test_labels_that_are_null_are_not_given(browser: Browser) -> None:
    body = {"inputs": "t", "parameters": {"candidate_labels": None}}
    _, answer = await browser.post("/models/entailer", body)
    assert answer["error"] == "parameters.candidate_labels: is missing"


async def test_a_context_that_answers_nothing_has_an_empty_answer() -> None:
    browser = Browser(_SPECS, lambda given: task_result(question_answering={}))
    body = {"inputs": {"question": "q", "context": " "}}
    empty = {"answer": "", "score": 0.0, "start": 0, "end": 0}
    assert await browser.post("/models/answerer", body) == (200, empty)
    assert await browser.post("/models/answerer", body | {"parameters": {"top_k": 2}}) == (200, [])


@pytest.mark.parametrize("path", ["/models/org/labels", "/pipeline/text-classification/org/labels"])
async def test_a_name_of_the_hub_has_a_slash(path: str) -> None:
    browser = Browser(_SPECS, _answer, model_aliases="org/labels=labels")
    assert await browser.post(path, {"inputs": "t"}) == (200, [_WRITTEN_LABELS])


async def test_an_image_by_its_address_is_refused_by_name(browser: Browser) -> None:
    _, answer = await browser.post("/models/viewer", {"inputs": "https://example.com/cat.jpg"})
    assert answer["error"] == "inputs: is an address; send the image itself, in Base64"
