"""A model from its source to an endpoint in one call, which returns a client that can also delete the endpoint."""

import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from neuronpipe.api.v1.inference_pb2 import InferRequest, InferResponse
from neuronpipe.bundles.writing import check_is_there
from neuronpipe.client import Client
from neuronpipe.client.task_call import TaskCall, ValueT
from neuronpipe.client.task_methods import TaskMethods
from neuronpipe.core import errors
from neuronpipe.core.errors import DeadlineExceeded, InternalError, NeuronpipeError, SetupError
from neuronpipe.deploy import compose, kubernetes, sagemaker
from neuronpipe.deploy.compose import ComposeTarget
from neuronpipe.deploy.endpoint import DeployStep, Endpoint, ServerlessConfig, endpoint_name, take
from neuronpipe.deploy.kubernetes import KubernetesTarget
from neuronpipe.deploy.sagemaker import SageMakerTarget, failures, service
from neuronpipe.platform.storage import ObjectUri
from neuronpipe.tasks import TASKS

PROTOBUF = "application/x-protobuf"
_POLL_S = 0.5
_BY_STATUS: Mapping[int, Callable[[str], NeuronpipeError]] = {
    400: lambda message: errors.InvalidInput("request", message),
    404: errors.ModelNotFound,
    429: lambda message: errors.Overloaded(message, 1.0),
    503: errors.Unavailable,
    504: DeadlineExceeded,
}


class Predictor(Client):
    """The client of an endpoint in containers; see Client. `undeploy` ends the endpoint, `close` this client alone."""

    def __init__(self, connected: AbstractContextManager[str], undeploy: Callable[[], None], api_key: str = "") -> None:
        """`connected`: opens a connection to the endpoint, and yields its address."""
        self._stack = ExitStack()
        self._undeploy = undeploy
        super().__init__(self._stack.enter_context(connected), api_key=api_key or None)

    def close(self) -> None:
        super().close()
        self._stack.close()

    def undeploy(self) -> None:
        """Deletes the endpoint, and closes this client. Raises SetupError."""
        self.close()
        self._undeploy()


class SageMakerPredictor(TaskMethods):
    """The methods of tasks, and `infer`, over SageMaker's runtime. SageMaker alone limits the time of a call."""

    def __init__(self, name: str, undeploy: Callable[[], None], inputs: ObjectUri | None = None) -> None:
        """`inputs`: the folder for requests to an asynchronous endpoint. Raises SetupError."""
        super().__init__(is_bulk=False)
        self._name, self._undeploy, self._inputs = name, undeploy, inputs
        self._words = {"EndpointName": name, "ContentType": PROTOBUF, "Accept": PROTOBUF}
        self.runtime = service("sagemaker-runtime")

    def _call(self, call: TaskCall[ValueT]) -> ValueT:
        return call.read(self.infer(call.request).result)

    def infer(self, request: InferRequest, *, timeout_s: float = 900.0) -> InferResponse:
        """Runs one input of any task. Raises NeuronpipeError, and SetupError for calls that AWS refuses."""
        body = request.SerializeToString()
        answer = self._invoke_later(body, timeout_s) if self._inputs else self._invoke(body)
        return InferResponse.FromString(answer)

    def undeploy(self) -> None:
        self._undeploy()

    def _invoke(self, body: bytes) -> bytes:
        with failures("sagemaker-runtime"):
            try:
                answer: bytes = self.runtime.invoke_endpoint(Body=body, **self._words)["Body"].read()
            except self.runtime.exceptions.ModelError as error:
                raise _error_of(error.response["OriginalStatusCode"], error.response["OriginalMessage"]) from error
        return answer

    def _invoke_later(self, body: bytes, timeout_s: float) -> bytes:
        assert self._inputs  # noqa: S101 (of asynchronous endpoints)
        storage, id = service("s3"), uuid.uuid4().hex
        place = {"Bucket": self._inputs.bucket, "Key": f"{self._inputs.path.strip('/')}/{id}".strip("/")}
        gives_up_s = time.monotonic() + timeout_s
        with failures("sagemaker-runtime"):
            storage.put_object(Body=body, **place)
            try:
                location = f"s3://{place['Bucket']}/{place['Key']}"
                invocation = self.runtime.invoke_endpoint_async(InputLocation=location, **self._words)
                while time.monotonic() < gives_up_s:
                    if (answer := _object(storage, invocation["OutputLocation"])) is not None:
                        return answer
                    place_of_failure = invocation.get("FailureLocation")
                    if place_of_failure and (failure := _object(storage, place_of_failure)) is not None:
                        raise InternalError(failure.decode(errors="replace"))
                    time.sleep(_POLL_S)
            finally:
                storage.delete_object(**place)
        raise DeadlineExceeded(f"endpoint {self._name}: no result after {timeout_s:g} s")


def _object(storage: Any, location: str) -> bytes | None:
    """Returns the content of an object, and deletes the object; None if it does not exist yet."""
    uri = ObjectUri.parse(location)
    try:
        content: bytes = storage.get_object(Bucket=uri.bucket, Key=uri.path)["Body"].read()
    except storage.exceptions.NoSuchKey:
        return None
    storage.delete_object(Bucket=uri.bucket, Key=uri.path)
    return content


def _error_of(status: int, body: str) -> NeuronpipeError:
    try:
        message = str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        message = body
    return _BY_STATUS.get(status, InternalError)(message)


# A target of deployments.
Target: TypeAlias = ComposeTarget | KubernetesTarget | SageMakerTarget

# Name of a target → its class, and the steps that delete an endpoint completely.
_TARGETS: Mapping[str, tuple[Callable[..., Target], Callable[[str], Iterator[DeployStep]]]] = {
    "compose": (ComposeTarget, compose.undeploying),
    "kubernetes": (KubernetesTarget, kubernetes.undeploying),
    "sagemaker": (SageMakerTarget, sagemaker.undeploying),
}


def make_target(to: str, endpoint: Endpoint, **options: Any) -> Target:
    _check_model(endpoint)
    if to not in _TARGETS:
        raise SetupError(f"to: {to!r}, must be one of {', '.join(_TARGETS)}")
    return _TARGETS[to][0](endpoint, **options)


def _check_model(endpoint: Endpoint) -> None:
    """Raises SetupError if no compile step takes the model, which a dry run and a cluster would find late."""
    check_is_there(endpoint.source)
    if endpoint.task and endpoint.task.replace("-", "_") not in TASKS:
        names = ", ".join(name.replace("_", "-") for name in TASKS)
        raise SetupError(f"task {endpoint.task!r}: is not known; there are: {names}")


def undeploying(to: str, name: str) -> Iterator[DeployStep]:
    return _TARGETS[to][1](name)


@dataclass(frozen=True, slots=True)
class HuggingFaceModel:
    """A model of the Hub or of a folder; see Endpoint."""

    source: str | Path
    task: str = ""
    name: str = ""
    dtype: str = ""
    backend: str = "openvino"

    def deploy(
        self,
        to: str = "compose",
        *,
        serverless: ServerlessConfig | None = None,
        min_executors: int = 1,
        max_executors: int | None = None,
        image_prefix: str = "neuronpipe",
        report: Callable[[str], Any] = print,
        **options: Any,
    ) -> Predictor | SageMakerPredictor:
        """Deploys the model, waits until it answers, and returns its client. Raises SetupError."""
        endpoint = Endpoint(
            name=self.name or endpoint_name(str(self.source)),
            source=str(self.source),
            task=self.task,
            dtype=self.dtype,
            backend=self.backend,
            serverless=serverless,
            min_executors=min_executors,
            max_executors=max(min_executors, 1) if max_executors is None else max_executors,
            image_prefix=image_prefix,
        )
        target = make_target(to, endpoint, **options)
        take(target.deploying(), report, is_dry=False)

        def undeploy() -> None:
            take(undeploying(to, target.name), report, is_dry=False)

        if isinstance(target, SageMakerTarget):
            return SageMakerPredictor(target.name, undeploy, target.inputs)
        return Predictor(target.connected(), undeploy, target.api_key)
