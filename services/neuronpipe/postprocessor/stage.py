"""The post-process stage: unpacks the model's outputs and lets the task decode them."""

from neuronpipe.api.v1.stages_pb2 import PostprocessItem
from neuronpipe.api.v1.tasks_pb2 import TaskResult
from neuronpipe.bundles.repository import Bundle
from neuronpipe.core.model import ModelTable
from neuronpipe.core.stages import Call
from neuronpipe.core.tensors import to_arrays
from neuronpipe.core.worker import Worker
from neuronpipe.tasks import TASKS


class PostprocessorStage:
    """Decodes outputs. The instance's `postprocess` is the stage function."""

    def __init__(self, bundles: list[Bundle]) -> None:
        """Raises SetupError for a file that is missing or was changed."""
        self._models = ModelTable({bundle.key: bundle.decoding_spec() for bundle in bundles})
        self._worker = Worker("postprocess")

    async def postprocess(self, item: PostprocessItem) -> TaskResult:
        """Decodes the outputs of one input."""
        return await self._worker.run(item.ByteSize(), self._decode, item, Call.of_item(item.context))

    def _decode(self, item: PostprocessItem, call: Call) -> TaskResult:
        call.check_deadline()
        model = self._models.find(item.model, item.version)
        task = TASKS[item.input.WhichOneof("task") or model.task]
        annotations = [to_arrays(annotation) for annotation in item.annotations]
        outputs = [to_arrays(output) for output in item.outputs]
        return TaskResult(**{task.name: task.decode(getattr(item.input, task.name), model, annotations, outputs)})

    def close(self) -> None:
        """Waits for the item being decoded and ends the thread."""
        self._worker.close()
