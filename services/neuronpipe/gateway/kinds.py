"""The kinds of running requests: plain inputs (running.py), tensors of callers, and generated texts (generation.py)."""

from neuronpipe.core.items import EncodedInput, Prediction, Work
from neuronpipe.core.model import ModelSpec
from neuronpipe.gateway.generation import GenerationRequest
from neuronpipe.gateway.requests import InferenceRequest, Result
from neuronpipe.gateway.running import RunningRequest
from neuronpipe.tasks import TASKS


class OwnTensorsRequest(RunningRequest):
    """Tensors of a caller who tokenized: the result is the outputs of the model itself."""

    @property
    def is_repeatable(self) -> bool:
        return False

    @property
    def known_tokens(self) -> int:
        image_tokens = super().known_tokens
        return self._encoded.tokens if image_tokens is None else image_tokens

    async def tokenize(self, work: Work) -> EncodedInput:
        return self._encoded

    async def postprocess(self, work: Work, encoded: EncodedInput, prediction: Prediction) -> Result:
        return prediction.outputs

    @property
    def _encoded(self) -> EncodedInput:
        assert self.request.encoded  # noqa: S101 (it makes the request one of this kind)
        return self.request.encoded


def kind_of(request: InferenceRequest, spec: ModelSpec) -> type[RunningRequest]:
    """Returns the class that runs a request for a model. Raises InvalidInput if the input cannot be parsed."""
    if request.encoded:
        return OwnTensorsRequest
    task = TASKS[spec.task]
    return GenerationRequest if task.generates and request.input.task == task.name else RunningRequest
