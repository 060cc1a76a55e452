"""gateway/results.py: a result that is known is not computed again, and is never another request's."""

import asyncio
import datetime
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from neuronpipe.api.v1.inference_pb2 import (
    CacheControl,
    CacheOutcome,
    InferBatchRequest,
    InferRequest,
    InferResponse,
    Usage,
)
from neuronpipe.api.v1.tasks_pb2 import GenerationOptions, TaskInput, TaskResult
from neuronpipe.bundles.repository import read_repository
from neuronpipe.core.calls import Call
from neuronpipe.core.errors import DeadlineExceeded, InvalidInput, SetupError, Unavailable
from neuronpipe.core.items import EncodedInput, ExecuteItem, ModelKey, PostprocessItem, Prediction, Stages, TokenizeItem
from neuronpipe.core.metrics import Telemetry
from neuronpipe.core.names import Attributes, Metrics, Spans
from neuronpipe.core.packed import NO_TENSORS, Packed, TensorSets, pack_result
from neuronpipe.doors.native import NativeDoor
from neuronpipe.gateway.assembly import running_pipeline
from neuronpipe.gateway.catalog import Catalog
from neuronpipe.gateway.generation import GenerationRequest
from neuronpipe.gateway.request_observer import ModelMeters
from neuronpipe.gateway.requests import InferenceRequest
from neuronpipe.gateway.results import running_result_cache
from neuronpipe.gateway.routing import GatewayModel
from neuronpipe.gateway.settings import PipelineSettings, ResultCacheSettings
from neuronpipe.platform.cache.cache import Cache
from neuronpipe.platform.cache.settings import RedisSettings
from tests.servers.door import Door
from tests.unit.bundles.written import write_bundle
from tests.unit.model_specs import model_spec
from tests.unit.recorded import Recorded
from tests.unit.task_messages import task_input, task_result

_HIT, _MISS = CacheOutcome.CACHE_OUTCOME_HIT_MEMORY, CacheOutcome.CACHE_OUTCOME_MISS
_BYPASS = CacheOutcome.CACHE_OUTCOME_BYPASS


class _Stages:
    """Stages that count, and whose results say what they are for."""

    def __init__(self) -> None:
        self.computed: list[str] = []
        self.may_end = asyncio.Event()
        self.may_end.set()

    @property
    def functions(self) -> Stages:
        return Stages(self.tokenize, self.execute, self.postprocess)

    async def tokenize(self, item: TokenizeItem) -> EncodedInput:
        return EncodedInput(TensorSets(data=[b""]), tokens=5, truncated_tokens=2)

    async def execute(self, item: ExecuteItem) -> Prediction:
        await self.may_end.wait()
        return Prediction(NO_TENSORS, batch_size=3, queue_ns=7)

    async def postprocess(self, item: PostprocessItem) -> Packed[TaskResult]:
        text = f"{item.model.name}/{item.model.version}: {item.input.message.text_classification.text}"
        self.computed.append(text)
        return pack_result(task_result(text_classification={"labels": [{"label": text, "score": 0.5}]}))


@pytest.fixture
def stages() -> _Stages:
    return _Stages()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Two versions of a model whose results are cached by setting, one cached by its manifest, and one that is not."""
    write_bundle(tmp_path, "set", 1)
    write_bundle(tmp_path, "set", 2)
    write_bundle(tmp_path, "compiled", 1, cache_results=True)
    write_bundle(tmp_path, "plain", 1)
    return tmp_path


@asynccontextmanager
async def _running(
    repository: Path, stages: Stages, asked: str, telemetry: Telemetry | None = None, **limits: Any
) -> AsyncIterator[Door]:
    results, limited = ResultCacheSettings(result_cache_models=asked), PipelineSettings(**limits)
    bundles = read_repository(repository)
    running_parts = running_pipeline(stages, limited, results, telemetry or Telemetry(), bundles)
    async with running_parts as (models, running):
        for bundle in bundles:
            await models.open(bundle)
        yield Door(NativeDoor(running, Catalog(models), limited))


@pytest_asyncio.fixture
async def pipeline(stages: _Stages, repository: Path) -> AsyncIterator[Door]:
    async with _running(repository, stages.functions, "set") as door:
        yield door


def _request(text: str = "so", model: str = "set", **changes: Any) -> InferRequest:
    return InferRequest(model=model, input=task_input(text_classification={"text": text}), **changes)


async def _infer(pipeline: Door, request: InferRequest) -> InferResponse:
    return await pipeline.infer(request, Call())


async def test_a_known_result_is_not_computed_again(pipeline: Door, stages: _Stages) -> None:
    first, second = await _infer(pipeline, _request(request_id="a")), await _infer(pipeline, _request(request_id="b"))
    assert stages.computed == ["set/2: so"]
    assert second.result == first.result
    assert (first.usage.result_cache, second.usage.result_cache) == (_MISS, _HIT)


async def test_the_first_request_is_a_miss_where_redis_does_not_answer(repository: Path, stages: _Stages) -> None:
    results = ResultCacheSettings(result_cache_models="set")
    redis, limits = RedisSettings(redis_url="redis://127.0.0.1:1/0"), PipelineSettings()
    bundles = read_repository(repository)
    running_parts = running_pipeline(stages.functions, limits, results, Telemetry(), bundles, redis=redis)
    async with running_parts as (models, running):
        for bundle in bundles:
            await models.open(bundle)
        door = Door(NativeDoor(running, Catalog(models), limits))
        outcomes = [(await _infer(door, _request())).usage.result_cache for _ in range(2)]
    assert outcomes == [_MISS, _HIT]


async def test_a_known_result_comes_with_what_is_true_of_this_request(pipeline: Door) -> None:
    await _infer(pipeline, _request(request_id="a"))
    response = await _infer(pipeline, _request(request_id="b"))
    assert (response.model, response.version, response.request_id) == ("set", "2", "b")
    assert (response.usage.tokens, response.usage.truncated_tokens, response.usage.batch_size) == (5, 2, 0)
    assert response.timings.total_ns > 0
    assert response.timings.predict_ns == 0


async def test_equal_requests_at_a_time_are_computed_once(pipeline: Door, stages: _Stages) -> None:
    responses = await asyncio.gather(*(_infer(pipeline, _request()) for _ in range(20)))
    assert stages.computed == ["set/2: so"]
    assert [response.usage.result_cache for response in responses] == [_MISS] + [_HIT] * 19


@pytest.mark.parametrize(
    "other",
    [_request("other"), _request(version="1"), _request(model="compiled")],
    ids=["another text", "another version", "another model"],
)
async def test_another_request_is_computed(pipeline: Door, stages: _Stages, other: InferRequest) -> None:
    await _infer(pipeline, _request())
    assert (await _infer(pipeline, other)).usage.result_cache == _MISS
    assert len(set(stages.computed)) == 2


async def test_another_option_is_another_request(pipeline: Door, stages: _Stages) -> None:
    await _infer(pipeline, _request())
    request = _request()
    request.input.text_classification.top_k = 2
    assert (await _infer(pipeline, request)).usage.result_cache == _MISS


async def test_a_request_may_have_its_result_computed_and_not_kept(pipeline: Door, stages: _Stages) -> None:
    bypass = _request(cache_control=CacheControl.CACHE_CONTROL_BYPASS)
    outcomes = [(await _infer(pipeline, request)).usage.result_cache for request in (bypass, _request(), bypass)]
    assert outcomes == [_BYPASS, _MISS, _BYPASS]
    assert len(stages.computed) == 3


async def test_a_request_may_have_its_result_computed_anew(pipeline: Door, stages: _Stages) -> None:
    refresh = _request(cache_control=CacheControl.CACHE_CONTROL_REFRESH)
    outcomes = [(await _infer(pipeline, request)).usage.result_cache for request in (_request(), refresh, _request())]
    assert outcomes == [_MISS, _MISS, _HIT]
    assert len(stages.computed) == 2


async def test_a_model_that_did_not_ask_for_it_is_computed_every_time(pipeline: Door, stages: _Stages) -> None:
    outcomes = [(await _infer(pipeline, _request(model="plain"))).usage.result_cache for _ in range(2)]
    assert outcomes == [CacheOutcome.CACHE_OUTCOME_UNSPECIFIED] * 2
    assert len(stages.computed) == 2


async def test_a_model_may_be_compiled_to_have_its_results_kept(pipeline: Door, stages: _Stages) -> None:
    outcomes = [(await _infer(pipeline, _request(model="compiled"))).usage.result_cache for _ in range(2)]
    assert outcomes == [_MISS, _HIT]


async def test_a_known_result_is_answered_though_nothing_more_is_admitted(stages: _Stages, repository: Path) -> None:
    async with _running(repository, stages.functions, "*", max_requests_in_flight=1) as pipeline:
        await _infer(pipeline, _request("known"))
        stages.may_end.clear()
        waiting = asyncio.create_task(_infer(pipeline, _request("slow")))
        await asyncio.sleep(0.01)
        assert (await _infer(pipeline, _request("known"))).usage.result_cache == _HIT
        stages.may_end.set()
        await waiting


async def test_one_who_waits_for_anothers_result_keeps_his_deadline(pipeline: Door, stages: _Stages) -> None:
    stages.may_end.clear()
    patient = asyncio.create_task(_infer(pipeline, _request()))
    await asyncio.sleep(0)
    with pytest.raises(DeadlineExceeded):
        await pipeline.infer(_request(), Call(deadline_s=asyncio.get_running_loop().time() + 0.02))
    stages.may_end.set()
    assert (await patient).usage.result_cache == _MISS


async def test_one_without_a_deadline_learns_of_the_gateways(repository: Path, stages: _Stages) -> None:
    stages.may_end.clear()
    async with _running(repository, stages.functions, "set", max_request_s=0.02) as pipeline:
        with pytest.raises(
            DeadlineExceeded, match=r"^the result was not ready after 0\.02 s, the gateway's max_request_s$"
        ):
            await _infer(pipeline, _request())


async def test_a_fault_of_the_cache_hits_one_request_of_many(pipeline: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    async def get(cache: object, *args: object, **options: object) -> None:
        raise ValueError("secret")

    monkeypatch.setattr(Cache, "get", get)
    requests = [_request(request_id="one"), _request(model="plain")]
    bad, good = (await pipeline.infer_batch(InferBatchRequest(requests=requests), Call())).outcomes
    assert (bad.error.code, bad.error.message) == (13, "internal error; the server's log has it under request_id 'one'")
    assert good.response.model == "plain"


async def test_a_failure_is_not_kept(repository: Path, stages: _Stages) -> None:
    failures = iter([Unavailable("the stage is away")])

    async def execute(item: ExecuteItem) -> Prediction:
        for failure in failures:
            raise failure
        return Prediction(NO_TENSORS)

    async with _running(repository, Stages(stages.tokenize, execute, stages.postprocess), "*") as pipeline:
        with pytest.raises(Unavailable):
            await _infer(pipeline, _request())
        assert (await _infer(pipeline, _request())).usage.result_cache == _MISS


async def test_an_unknown_wish_is_refused(pipeline: Door) -> None:
    with pytest.raises(InvalidInput, match="cache_control: 9 is none of"):
        await _infer(pipeline, _request(cache_control=9))


async def test_a_setting_that_names_an_unknown_model_is_refused(repository: Path) -> None:
    with pytest.raises(SetupError, match="result_cache_models: other is not served; served are: compiled, plain, set"):
        async with _running(repository, _Stages().functions, "set, other"):
            pass


async def test_spans_and_metrics_say_where_a_result_came_from(stages: _Stages, repository: Path) -> None:
    telemetry = Recorded()
    async with _running(repository, stages.functions, "set", telemetry) as pipeline:
        _, known, _ = [await _infer(pipeline, _request(model=model)) for model in ("set", "set", "plain")]
    assert telemetry.counts(Metrics.RESULT_CACHE) == {("set", "2", "miss"): 1, ("set", "2", "hit_memory"): 1}
    assert telemetry.counts(Metrics.REQUEST_DURATION) == {("set", "2", "OK"): 2, ("plain", "1", "OK"): 1}
    assert telemetry.counts(Metrics.STAGE_DURATION)["set", "2", Spans.PREDICT] == 1
    computed, found, plain = telemetry.named(Spans.INFER)
    told = [root.attributes.get(Attributes.RESULT_CACHE) for root in (computed, found, plain)]
    assert told == ["miss", "hit_memory", None]
    assert [span.name for span in telemetry.spans if span.context.trace_id == found.context.trace_id] == [Spans.INFER]
    assert found.ended_ns - found.started_ns == known.timings.total_ns


@pytest.mark.parametrize(
    ("options", "own", "is_kept"),
    [
        ({}, {}, True),
        ({"num_beams": 2, "num_return_sequences": 2}, {}, True),
        ({"do_sample": True}, {}, False),
        ({"do_sample": True, "num_return_sequences": 2, "top_k": 5}, {}, False),
        ({"do_sample": True, "seed": 0}, {}, True),
        ({}, {"do_sample": True}, False),
        ({"seed": 3}, {"do_sample": True}, True),
        ({"do_sample": False}, {"do_sample": True}, True),
        ({"num_beams": 2}, {"do_sample": True}, True),
        ({"num_beams": 2, "do_sample": True}, {}, False),
    ],
    ids=str,
)
def test_texts_drawn_without_a_seed_are_not_kept(options: dict[str, Any], own: dict[str, Any], is_kept: bool) -> None:
    asked = GenerationOptions(**options)
    for task, input in (
        ("text_generation", task_input(text_generation={"prompt": "so", "options": asked})),
        ("summarization", task_input(summarization={"text": "so", "options": asked})),
    ):
        request = InferenceRequest(Call(), "m", "", Packed(TaskInput, message=input))
        spec, key = model_spec(task, **own), ModelKey("m", 1)
        model = GatewayModel(key, spec, ModelMeters(Telemetry().meters, key))
        pipeline: Any = SimpleNamespace(settings=PipelineSettings())
        timings: Any = None
        assert GenerationRequest(pipeline, request, Call(), model, timings).is_repeatable == is_kept


async def test_a_known_chat_is_of_its_day_because_templates_write_the_date(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = task_input(text_generation={"messages": [{"role": "user", "content": "so"}]})

    async def answer() -> tuple[Packed[TaskResult], Usage]:
        return pack_result(TaskResult()), Usage(tokens=3, generated_tokens=4, truncated_tokens=5, steps=6)

    async with running_result_cache(ResultCacheSettings(), Telemetry()) as cache:
        outcomes = []
        for day in (1, 1, 2):
            today = datetime.date(2026, 1, day)
            monkeypatch.setattr("neuronpipe.gateway.results.date", SimpleNamespace(today=lambda today=today: today))
            for input in (chat, _request().input):
                request = InferenceRequest(Call(), "m", "", Packed(TaskInput, message=input))
                model = SimpleNamespace(digest="digest")
                running: Any = SimpleNamespace(request=request, call=Call(), model=model, answer=answer)
                _, usage = await cache.get(running)
                outcomes.append(usage.result_cache)
    assert outcomes == [_MISS, _MISS, _HIT, _HIT, _MISS, _HIT]
    assert usage == Usage(tokens=3, generated_tokens=4, truncated_tokens=5, result_cache=_HIT)
