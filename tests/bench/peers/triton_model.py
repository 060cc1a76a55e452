"""What Triton's Python back end loads: it takes the batches that Triton's dynamic batcher makes."""

import json
from typing import Any

import numpy as np
import triton_python_backend_utils as triton

from tests.bench.peers.classifier import load_classifier


class TritonPythonModel:
    """TEXT [1] → LABEL [1], SCORE [1]."""

    def initialize(self, args: dict[str, str]) -> None:
        """Called once for an instance of the model."""
        parameters = json.loads(args["model_config"])["parameters"]
        self._classifier = load_classifier(
            parameters["source"]["string_value"], int(parameters["threads"]["string_value"])
        )

    def execute(self, requests: list[Any]) -> list[Any]:
        """Called with the requests of one dynamic batch; each has one text or more."""
        inputs = [triton.get_input_tensor_by_name(request, "TEXT").as_numpy().reshape(-1) for request in requests]
        answers = iter(self._classifier([text.decode() for texts in inputs for text in texts]))
        return [self._response([next(answers) for _ in texts]) for texts in inputs]

    def _response(self, answers: list[tuple[str, float]]) -> Any:
        labels = np.array([[label.encode()] for label, _ in answers], dtype=np.object_)
        scores = np.array([[score] for _, score in answers], dtype=np.float32)
        return triton.InferenceResponse([triton.Tensor("LABEL", labels), triton.Tensor("SCORE", scores)])
