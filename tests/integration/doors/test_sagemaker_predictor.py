"""The predictor of an endpoint of SageMaker. The HTTP door stands in for its runtime, which passes bodies on."""

import http.client
import json

import numpy as np
import pytest
from botocore.stub import Stubber

from neuronpipe.api.v1.inference_pb2 import InferRequest, InferResponse
from neuronpipe.client import Client
from neuronpipe.core.errors import InternalError, InvalidInput, ModelNotFound, NeuronpipeError, Overloaded
from neuronpipe.deploy.model import PROTOBUF, SageMakerPredictor
from tests.systems.http_server import HttpServer

pytestmark = [pytest.mark.local_only, pytest.mark.sampled]


@pytest.fixture
def predictor(http_server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> SageMakerPredictor:
    monkeypatch.setenv("AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME", http_server.url)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-central-1")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "none")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    return SageMakerPredictor("classifier", lambda: None)


def test_its_methods_give_what_the_clients_give(predictor: SageMakerPredictor, ours: Client) -> None:
    [label] = ours.classify("classifier", "A fine day.")
    [found] = predictor.classify("classifier", "A fine day.")
    assert found.label == label.label
    assert found.score == pytest.approx(label.score, abs=1e-6)
    vector = predictor.embed("minilm", "A fine day.")
    assert np.allclose(vector, ours.embed("minilm", "A fine day."), atol=1e-6)


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (404, '{"error": "no such model"}', ModelNotFound),
        (400, '{"error": "text: is empty"}', InvalidInput),
        (429, '{"error": "full"}', Overloaded),
        (500, "a proxy's page", InternalError),
    ],
)
def test_what_the_container_refuses_is_raised_as_the_clients_raise_it(
    predictor: SageMakerPredictor, status: int, body: str, expected: type[NeuronpipeError]
) -> None:
    modeled = {"OriginalStatusCode": status, "OriginalMessage": body}
    stubbed = Stubber(predictor.runtime)
    stubbed.add_client_error("invoke_endpoint", "ModelError", modeled_fields=modeled)
    with stubbed, pytest.raises(expected) as refused:
        predictor.classify("classifier", "A fine day.")
    assert (json.loads(body)["error"] if body.startswith("{") else body) in refused.value.message


def test_a_body_that_is_no_message_is_the_callers_fault(http_server: HttpServer) -> None:
    connection = http.client.HTTPConnection(http_server.address)
    for body, status in ((b"\xff", 400), (InferRequest(model="classifier").SerializeToString(), 400)):
        connection.request("POST", "/invocations", body, {"Content-Type": PROTOBUF})
        response = connection.getresponse()
        assert (response.status, b"error" in response.read()) == (status, True)
    connection.close()


def test_the_answer_has_timings_and_usage(predictor: SageMakerPredictor) -> None:
    request = InferRequest(model="classifier")
    request.input.text_classification.text = "A fine day."
    found: InferResponse = predictor.infer(request)
    assert found.model == "classifier"
    assert found.usage.ByteSize()
    assert found.timings.ByteSize()
