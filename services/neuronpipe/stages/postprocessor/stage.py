"""The post-process stage: lets the task decode the model's outputs."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, replace

from neuronpipe.api.v1.tasks_pb2 import TaskResult
from neuronpipe.bundles.repository import Bundle
from neuronpipe.bundles.served import ServedModels, running_models
from neuronpipe.core.generated import Released
from neuronpipe.core.items import DetokenizeItem, PostprocessItem
from neuronpipe.core.model import ModelSpec
from neuronpipe.core.packed import Packed, pack_body
from neuronpipe.platform.process.background import run_apart
from neuronpipe.platform.process.lanes import Lane, Lanes, is_on_event_loop
from neuronpipe.stages.postprocessor.detokenizer import load_detokenizer
from neuronpipe.tasks import ANSWERED_TASKS, TASKS
from neuronpipe.tasks.decoding_checks import check_decodable
from neuronpipe.tasks.generated_text import Detokenizer
from neuronpipe.tasks.text_generation import released_text


@dataclass(frozen=True, slots=True)
class DecodingModel:
    """One model of the stage, and the lane in which its outputs are decoded.

    `detokenizer`: only for a generating model.
    """

    spec: ModelSpec
    lane: Lane
    detokenizer: Detokenizer | None = None

    def decode(self, item: PostprocessItem) -> Packed[TaskResult]:
        """Decodes the outputs of one input, on its lane."""
        item.call.check_deadline(has_begun=True)
        task = ANSWERED_TASKS[item.input.task or self.spec.task]
        self.spec.check_answers(task.name)
        annotations, outputs = item.annotations.arrays, item.outputs.arrays
        if task.name in TASKS:
            check_decodable(task, self.spec, annotations, outputs)
        decoders = (self.detokenizer,) if task.generates else ()
        decoded = task.decode(item.input.body, self.spec, annotations, outputs, *decoders)
        result = pack_body(TaskResult, task.name, decoded)
        if not is_on_event_loop():
            # The lane's thread serializes a large result here, so that the event loop need not.
            _ = result.data
        return result

    def detokenize(self, item: DetokenizeItem) -> Released:
        """Makes text of new tokens as far as it cannot change any more."""
        assert self.detokenizer  # noqa: S101 (the model generates)
        return released_text(item.options, item.window, item.token_ids, self.detokenizer)


class PostprocessorStage:
    """Decodes outputs. `postprocess` is the stage function, and `postprocess_at_once` its form without a task.

    `detokenize_at_once` is the form for new tokens of a text: a step has tokens of many texts, and messages for each
    would take most of the time.
    """

    def __init__(self, models: ServedModels[DecodingModel]) -> None:
        self.models = models

    async def postprocess(self, item: PostprocessItem) -> Packed[TaskResult]:
        with self.models.table.at(item.model) as model:
            return await model.lane.run(item.call.caller.tenant, item.work_bytes, model.decode, item)

    def postprocess_at_once(self, item: PostprocessItem) -> Packed[TaskResult] | None:
        """Returns the result if the outputs are small and no others wait, otherwise None."""
        with self.models.table.at(item.model) as model:
            return model.lane.run_at_once(item.work_bytes, model.decode, item)

    def detokenize_at_once(self, item: DetokenizeItem) -> Released | None:
        """Returns the text of new tokens if they need no more than the text and no others wait, otherwise None."""
        if item.options.HasField("top_logprobs"):
            return None
        with self.models.table.at(item.model) as model:
            return model.lane.run_at_once(item.size_bytes, model.detokenize, item)


@asynccontextmanager
async def running_postprocessor(bundles: list[Bundle]) -> AsyncIterator[PostprocessorStage]:
    """Runs the stage with all objects loaded that decoding needs.

    Raises SetupError if a file is missing or was changed.
    """
    async with AsyncExitStack() as stack:
        lanes = stack.enter_context(closing(Lanes("postprocess")))

        @asynccontextmanager
        async def open_model(bundle: Bundle) -> AsyncIterator[DecodingModel]:
            spec, lane = await run_apart(bundle.decoding_spec), lanes.lane(bundle.spec.name)
            generates = TASKS[spec.task].generates
            detokenizer = await run_apart(bundle.read_tokenizer, load_detokenizer) if generates else None
            try:
                yield DecodingModel(spec, lane, detokenizer)
            finally:
                await lane.close()

        def adapt(model: DecodingModel, bundle: Bundle) -> DecodingModel:
            return replace(model, spec=bundle.spec)

        models = ServedModels(open_model, adapt=adapt)
        yield PostprocessorStage(await stack.enter_async_context(running_models(models, bundles)))
