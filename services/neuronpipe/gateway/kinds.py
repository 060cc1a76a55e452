"""The kinds of requests: how each gets from its input to its result. The third kind is in generation.py."""

from collections.abc import Awaitable

from neuronpipe.api.v1.inference_pb2 import Usage
from neuronpipe.core.calls import Call
from neuronpipe.core.items import EncodedInput, ExecuteItem, PostprocessItem, Prediction, Stages, TokenizeItem, Work
from neuronpipe.gateway.admission import Admission
from neuronpipe.gateway.inference import InferenceRequest, Result
from neuronpipe.gateway.request_checks import check_input, has_image
from neuronpipe.gateway.routing import GatewayModel
from neuronpipe.gateway.settings import PipelineSettings

# So the default limit of a million tokens in flight keeps images to 64 MiB of memory.
_IMAGE_BYTES_PER_TOKEN = 64


class PlainInput:
    """An input of a task: the tokenizer encodes it, the model computes it once, and the task decodes the outputs.

    `new_tokens`: the most tokens that the request generates. `first_token_ns`: the time of the first token on
    time.monotonic_ns(); 0 if there is none. `is_repeatable`: whether equal requests have equal
    results, so that the gateway may keep one result for all of them.
    """

    new_tokens = 0
    first_token_ns = 0
    is_repeatable = True

    def __init__(self, request: InferenceRequest, call: Call, model: GatewayModel, settings: PipelineSettings) -> None:
        """Checks that the model takes the input. Raises InvalidInput and WrongTask."""
        self.size_bytes = check_input(request, model.spec, settings)
        self._request, self._call, self._model = request, call, model

    @property
    def known_tokens(self) -> int | None:
        """The cost of the input, where it is known before the input is tokenized."""
        if not has_image(self._request, self._model.spec):
            return None
        # The tokens of an image are known, and its bytes take the memory.
        return self._model.spec.image_tokens + self.size_bytes // _IMAGE_BYTES_PER_TOKEN

    # The next three return what the stages return: a coroutine around it would cost each request a microsecond.

    def preprocess(self, stages: Stages, work: Work) -> Awaitable[EncodedInput]:
        """Makes sequences of the input."""
        return stages.tokenize(TokenizeItem(self._call, self._model.key, self._request.input, work=work))

    def note_encoded(self, encoded: EncodedInput) -> None:
        """Corrects `new_tokens` by the tokens of the input. Raises InvalidInput."""

    def predict(self, stages: Stages, work: Work, encoded: EncodedInput, admission: Admission) -> Awaitable[Prediction]:
        """Computes the outputs of the sequences."""
        return stages.execute(ExecuteItem(self._call, self._model.key, encoded.sequences, work=work))

    def postprocess(
        self, stages: Stages, work: Work, encoded: EncodedInput, prediction: Prediction
    ) -> Awaitable[Result]:
        """Makes the result of the outputs."""
        input, annotations, outputs = self._request.input, encoded.annotations, prediction.outputs
        return stages.postprocess(PostprocessItem(self._call, self._model.key, input, annotations, outputs, work=work))

    def usage(self, encoded: EncodedInput, prediction: Prediction) -> Usage:
        """The cost of the request, as its caller is told."""
        return Usage(
            tokens=encoded.tokens,
            truncated_tokens=encoded.truncated_tokens,
            batch_size=prediction.batch_size,
            bucket_tokens=prediction.bucket_tokens,
            token_cache=encoded.token_cache,
            padded_tokens=prediction.padded_tokens,
        )


class OwnTensors(PlainInput):
    """Tensors of a caller who tokenized: the result is the outputs of the model itself."""

    is_repeatable = False

    def __init__(self, request: InferenceRequest, call: Call, model: GatewayModel, settings: PipelineSettings) -> None:
        super().__init__(request, call, model, settings)
        assert request.encoded  # noqa: S101 (it makes the request one of this kind)
        self._encoded = request.encoded

    @property
    def known_tokens(self) -> int:
        of_image = super().known_tokens
        return self._encoded.tokens if of_image is None else of_image

    async def preprocess(self, stages: Stages, work: Work) -> EncodedInput:
        return self._encoded

    async def postprocess(self, stages: Stages, work: Work, encoded: EncodedInput, prediction: Prediction) -> Result:
        return prediction.outputs
