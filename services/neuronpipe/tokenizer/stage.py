"""The pre-process stage: finds the model's tokenizer, lets the task encode, and packs the sequences."""

from dataclasses import dataclass

from neuronpipe.api.v1.stages_pb2 import EncodedInput, TokenizeItem
from neuronpipe.bundles.repository import Bundle
from neuronpipe.core.model import ModelSpec, ModelTable
from neuronpipe.core.stages import Call
from neuronpipe.core.tensors import to_tensor_set
from neuronpipe.core.worker import Worker
from neuronpipe.tasks import TASKS
from neuronpipe.tasks.base import TextTokenizer
from neuronpipe.tokenizer.text import JsonTokenizer


@dataclass(frozen=True, slots=True)
class _Model:
    spec: ModelSpec
    tokenizer: TextTokenizer


class TokenizerStage:
    """Encodes inputs. The instance's `tokenize` is the stage function."""

    def __init__(self, bundles: list[Bundle]) -> None:
        """Loads every bundle's tokenizer. Raises SetupError for a file that is missing or was changed."""
        self._models = ModelTable({bundle.key: _Model(bundle.spec, JsonTokenizer(bundle.tokenizer_file())) for bundle in bundles})
        self._worker = Worker("tokenize")

    async def tokenize(self, item: TokenizeItem) -> EncodedInput:
        """Encodes one input."""
        return await self._worker.run(item.ByteSize(), self._encode, item, Call.of_item(item.context))

    def _encode(self, item: TokenizeItem, call: Call) -> EncodedInput:
        call.check_deadline()
        model = self._models.find(item.model, item.version)
        task = TASKS[model.spec.task]
        encoded = task.encode(getattr(item.input, task.name), model.tokenizer, model.spec)
        return EncodedInput(
            sequences=[to_tensor_set(sequence) for sequence in encoded.sequences],
            annotations=[to_tensor_set(annotation) for annotation in encoded.annotations],
            tokens=sum(len(sequence["input_ids"]) for sequence in encoded.sequences),
            truncated_tokens=encoded.truncated_tokens,
        )

    def close(self) -> None:
        """Waits for the item being encoded and ends the thread."""
        self._worker.close()
