"""The predictor of an asynchronous endpoint, against moto's simulation of AWS: requests and results pass through S3."""

from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from moto import mock_aws
from moto.sagemakerruntime.models import sagemakerruntime_backends

from neuronpipe.api.v1.inference_pb2 import InferRequest, InferResponse
from neuronpipe.core.errors import DeadlineExceeded, InternalError
from neuronpipe.deploy.model import PROTOBUF, SageMakerPredictor
from neuronpipe.platform.storage import ObjectUri

_REGION, _ACCOUNT, _BUCKET = "eu-central-1", "123456789012", "models"


@pytest.fixture
def predictor(monkeypatch: pytest.MonkeyPatch) -> Iterator[SageMakerPredictor]:
    monkeypatch.setenv("AWS_DEFAULT_REGION", _REGION)
    with mock_aws():
        boto3.client("s3").create_bucket(Bucket=_BUCKET, CreateBucketConfiguration={"LocationConstraint": _REGION})
        yield SageMakerPredictor("endpoint", lambda: None, ObjectUri.parse(f"s3://{_BUCKET}/in"))


def _will_answer(data: str, *, is_failure: bool = False) -> None:
    sagemakerruntime_backends[_ACCOUNT][_REGION].async_results_queue.append((is_failure, data))


def _objects() -> list[str]:
    """What is in any bucket."""
    storage = boto3.client("s3")
    names = [bucket["Name"] for bucket in storage.list_buckets()["Buckets"]]
    return [content["Key"] for name in names for content in storage.list_objects_v2(Bucket=name).get("Contents", [])]


def test_a_result_is_read_from_where_the_endpoint_writes_it_and_nothing_is_left(predictor: SageMakerPredictor) -> None:
    response = InferResponse(model="classifier")
    response.result.text_classification.labels.add(label="calm", score=2.0)
    _will_answer(response.SerializeToString().decode())  # moto takes text, and these bytes are ASCII
    sent: list[tuple[str, InferRequest]] = []

    def look(params: dict[str, Any], **_: object) -> None:
        place = ObjectUri.parse(params["headers"]["X-Amzn-SageMaker-InputLocation"])
        body = boto3.client("s3").get_object(Bucket=place.bucket, Key=place.path)["Body"].read()
        sent.append((params["headers"]["X-Amzn-SageMaker-Content-Type"], InferRequest.FromString(body)))

    predictor.runtime.meta.events.register("before-call.sagemaker-runtime.InvokeEndpointAsync", look)
    [found] = predictor.classify("classifier", "A fine day.")
    assert (found.label, found.score) == ("calm", 2.0)
    [(kind, request)] = sent
    assert kind == PROTOBUF
    assert request.input.text_classification.text == "A fine day."
    assert _objects() == []


def test_what_the_endpoint_could_not_do_is_raised(predictor: SageMakerPredictor) -> None:
    _will_answer("the container said no", is_failure=True)
    with pytest.raises(InternalError, match="the container said no"):
        predictor.classify("classifier", "A fine day.")
    assert _objects() == []


def test_a_missing_result_is_waited_for_no_longer_than_the_caller_says(predictor: SageMakerPredictor) -> None:
    def lose(parsed: dict[str, Any], **_: object) -> None:
        place = ObjectUri.parse(parsed["OutputLocation"])
        boto3.client("s3").delete_object(Bucket=place.bucket, Key=place.path)

    predictor.runtime.meta.events.register("after-call.sagemaker-runtime.InvokeEndpointAsync", lose)
    with pytest.raises(DeadlineExceeded, match=r"endpoint endpoint: no result after 0\.1 s"):
        predictor.infer(InferRequest(model="classifier"), timeout_s=0.1)
    assert _objects() == []
