"""An endpoint of SageMaker, against moto's simulation of AWS: real-time, serverless and asynchronous."""

import io
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto import mock_aws

from neuronpipe.core.errors import SetupError
from neuronpipe.deploy.endpoint import Endpoint, ServerlessConfig, take
from neuronpipe.deploy.sagemaker import VARIANT, SageMakerTarget, undeploying
from tests.unit.bundles.written import write_bundle

_BUCKET, _REGION = "models", "eu-central-1"


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An account with a bucket, and nothing else."""
    monkeypatch.setenv("AWS_DEFAULT_REGION", _REGION)
    with mock_aws(config={"core": {"reset_boto3_session": False}}):  # what it read of AWS is kept for the next test
        boto3.client("s3").create_bucket(Bucket=_BUCKET, CreateBucketConfiguration={"LocationConstraint": _REGION})
        yield


def _target(
    folder: Path,
    *,
    asynchronous: str = "",
    instance_type: str = "ml.c5.xlarge",
    bucket: str = f"s3://{_BUCKET}/p",
    **changes: Any,
) -> SageMakerTarget:
    source = folder / "models/classifier/1"
    if not source.exists():
        write_bundle(folder / "models", "classifier")
    role = "arn:aws:iam::123456789012:role/r"
    place = {"image": "image:1", "role": role, "bucket": bucket}
    place |= {"instance_type": instance_type, "asynchronous": asynchronous}
    return SageMakerTarget(Endpoint(name="m", source=str(source), **changes), **place)


def _deploy(target: SageMakerTarget) -> dict[str, Any]:
    """The endpoint's configuration, as SageMaker has it."""
    take(target.deploying(), lambda line: None, is_dry=False)
    client = boto3.client("sagemaker")
    assert client.describe_endpoint(EndpointName="m")["EndpointStatus"] == "InService"
    found: dict[str, Any] = client.describe_endpoint_config(EndpointConfigName="m")
    return found


@pytest.mark.usefixtures("aws")
def test_a_serverless_endpoint_has_its_memory_and_concurrency(tmp_path: Path) -> None:
    [variant] = _deploy(_target(tmp_path, serverless=ServerlessConfig(4096, 10)))["ProductionVariants"]
    assert variant["ServerlessConfig"] == {"MemorySizeInMB": 4096, "MaxConcurrency": 10}
    assert "InstanceType" not in variant
    container = boto3.client("sagemaker").describe_model(ModelName="m")["PrimaryContainer"]
    assert container == {
        "Image": "image:1",
        "ModelDataUrl": "s3://models/p/m/model.tar.gz",
        "Environment": {"NEURONPIPE_ALL_DEFAULT_MODELS": "classifier", "NEURONPIPE_ALL_MAX_REQUESTS_IN_FLIGHT": "10"},
    }


@pytest.mark.usefixtures("aws")
def test_a_real_time_endpoint_has_instances_and_scales(tmp_path: Path) -> None:
    [variant] = _deploy(_target(tmp_path, min_executors=2, max_executors=5))["ProductionVariants"]
    assert (variant["InitialInstanceCount"], variant["InstanceType"]) == (2, "ml.c5.xlarge")
    [scaled] = _scaled()
    expected = (f"endpoint/m/variant/{VARIANT}", 2, 5)
    assert (scaled["ResourceId"], scaled["MinCapacity"], scaled["MaxCapacity"]) == expected


def _scaled() -> list[dict[str, Any]]:
    client = boto3.client("application-autoscaling")
    found: list[dict[str, Any]] = client.describe_scalable_targets(ServiceNamespace="sagemaker")["ScalableTargets"]
    return found


@pytest.mark.usefixtures("aws")
def test_an_asynchronous_endpoint_writes_to_s3_and_scales_to_none(tmp_path: Path) -> None:
    found = _deploy(_target(tmp_path, asynchronous="s3://models/out", min_executors=0, max_executors=3))
    expected = {"S3OutputPath": "s3://models/out", "S3FailurePath": "s3://models/out/failures"}
    assert found["AsyncInferenceConfig"]["OutputConfig"] == expected
    [scaled] = _scaled()
    assert (scaled["MinCapacity"], scaled["MaxCapacity"]) == (0, 3)


@pytest.mark.usefixtures("aws")
def test_one_request_wakes_an_asynchronous_endpoint_that_has_no_instance(tmp_path: Path) -> None:
    _deploy(_target(tmp_path, asynchronous="s3://models/out", min_executors=0, max_executors=3))
    [alarm] = _alarms()
    assert (alarm["Namespace"], alarm["MetricName"]) == ("AWS/SageMaker", "HasBacklogWithoutCapacity")
    assert alarm["Dimensions"] == [{"Name": "EndpointName", "Value": "m"}]
    assert (alarm["Threshold"], alarm["ComparisonOperator"]) == (1.0, "GreaterThanOrEqualToThreshold")
    policies = boto3.client("application-autoscaling").describe_scaling_policies(ServiceNamespace="sagemaker")
    [waking] = [policy for policy in policies["ScalingPolicies"] if policy["PolicyType"] == "StepScaling"]
    assert alarm["AlarmActions"] == [waking["PolicyARN"]]
    [step] = waking["StepScalingPolicyConfiguration"]["StepAdjustments"]
    assert (step["MetricIntervalLowerBound"], step["ScalingAdjustment"]) == (0.0, 1)


@pytest.mark.usefixtures("aws")
def test_an_endpoint_that_always_has_an_instance_needs_no_alarm(tmp_path: Path) -> None:
    _deploy(_target(tmp_path, asynchronous="s3://models/out", max_executors=3))
    assert _alarms() == []


def _alarms() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = boto3.client("cloudwatch").describe_alarms()["MetricAlarms"]
    return found


def test_the_call_has_its_body_in_a_file_which_every_version_of_the_aws_program_takes(tmp_path: Path) -> None:
    assert _target(tmp_path).call().splitlines() == [
        """echo '{"inputs": "TEXT"}' > request.json""",
        "aws sagemaker-runtime invoke-endpoint --endpoint-name m --content-type application/json "
        "--body fileb://request.json answer.json",
    ]


@pytest.mark.usefixtures("aws")
def test_the_bundle_is_packed_as_the_image_reads_it(tmp_path: Path) -> None:
    _deploy(_target(tmp_path))
    packed = boto3.client("s3").get_object(Bucket=_BUCKET, Key="p/m/model.tar.gz")["Body"].read()
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        names = {Path(name).as_posix() for name in tar.getnames()}
    assert {"manifest.json", "tokenizer.json", "artifacts/openvino/model.bin"} <= names


@pytest.mark.usefixtures("aws")
@pytest.mark.parametrize(("asynchronous", "fewest"), [("", 1), ("s3://models/out", 1), ("s3://models/out", 0)])
def test_nothing_is_left(tmp_path: Path, asynchronous: str, fewest: int) -> None:
    _deploy(_target(tmp_path, asynchronous=asynchronous, min_executors=fewest, max_executors=2))
    take(undeploying("m"), lambda line: None, is_dry=False)
    client = boto3.client("sagemaker")
    assert client.list_endpoints()["Endpoints"] == []
    assert client.list_endpoint_configs()["EndpointConfigs"] == []
    assert client.list_models()["Models"] == []
    assert boto3.client("s3").list_objects_v2(Bucket=_BUCKET)["KeyCount"] == 0
    assert _scaled() == []
    assert _alarms() == []


@pytest.mark.usefixtures("aws")
def test_what_is_not_there_is_deleted_without_a_word(tmp_path: Path) -> None:
    take(undeploying("m"), lambda line: None, is_dry=False)


@pytest.mark.usefixtures("aws")
def test_what_aws_refuses_is_said_in_its_words(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"sagemaker: ValidationException: Value 'ml\.none'"):
        _deploy(_target(tmp_path, instance_type="ml.none"))


@pytest.mark.usefixtures("aws")
def test_a_bucket_that_is_not_there_is_said_in_words_of_aws(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"s3: .*NoSuchBucket"):
        _deploy(_target(tmp_path, bucket="s3://nobodys"))


@pytest.mark.parametrize("steps", ["deploying", "undeploying"])
def test_without_boto3_what_to_install_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: str) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(SetupError, match=r"boto3, which is not installed: pip install 'neuronpipe\[deploy\]'"):
        take(
            _target(tmp_path).deploying() if steps == "deploying" else undeploying("m"), lambda line: None, is_dry=False
        )


@pytest.mark.usefixtures("aws")
def test_a_dry_run_creates_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    take(_target(tmp_path, serverless=ServerlessConfig()).deploying(), said.append, is_dry=True)
    assert "'MemorySizeInMB': 2048, 'MaxConcurrency': 5" in "\n".join(said)
    assert boto3.client("sagemaker").list_models()["Models"] == []
