"""An endpoint of Amazon SageMaker for the image `sagemaker`: model, endpoint configuration and endpoint, by boto3.

https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_CreateEndpointConfig.html
"""

import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from neuronpipe.core.errors import SetupError
from neuronpipe.deploy.endpoint import DeployStep, Endpoint, make_bundle, model_name
from neuronpipe.platform.storage import ObjectUri

VARIANT = "all"
# The scaling of an endpoint, by Application Auto Scaling and CloudWatch, for each instance: five waiting requests, as
# in AWS's own example, or a thousand calls per minute.
# https://docs.aws.amazon.com/sagemaker/latest/dg/async-inference-autoscale.html
_WAITING, _CALLS = 5.0, 1000.0


def scaled_variant(name: str) -> dict[str, Any]:
    """Returns the target of scaling: the instances of the endpoint of that name."""
    return {
        "ServiceNamespace": "sagemaker",
        "ResourceId": f"endpoint/{name}/variant/{VARIANT}",
        "ScalableDimension": "sagemaker:variant:DesiredInstanceCount",
    }


def policy_by_load(name: str, *, is_asynchronous: bool) -> dict[str, Any]:
    """Returns PutScalingPolicy's arguments: by waiting requests, or by arriving requests."""
    if is_asynchronous:
        backlog = _metric(name, "ApproximateBacklogSizePerInstance") | {"Statistic": "Average"}
        target = {"TargetValue": _WAITING, "CustomizedMetricSpecification": backlog}
    else:
        calls = {"PredefinedMetricType": "SageMakerVariantInvocationsPerInstance"}
        target = {"TargetValue": _CALLS, "PredefinedMetricSpecification": calls}
    return scaled_variant(name) | {
        "PolicyName": name,
        "PolicyType": "TargetTrackingScaling",
        "TargetTrackingScalingPolicyConfiguration": target,
    }


def policy_from_none(name: str) -> dict[str, Any]:
    """Returns PutScalingPolicy's arguments that start the first instance of an asynchronous endpoint without any."""
    return scaled_variant(name) | {
        "PolicyName": waking_name(name),
        "PolicyType": "StepScaling",
        "StepScalingPolicyConfiguration": {
            "AdjustmentType": "ChangeInCapacity",
            "MetricAggregationType": "Average",
            "Cooldown": 300,
            "StepAdjustments": [{"MetricIntervalLowerBound": 0.0, "ScalingAdjustment": 1}],
        },
    }


def alarm_of_none(name: str) -> dict[str, Any]:
    """Returns PutMetricAlarm's arguments, without its action: requests waited for two minutes without an instance."""
    return {
        "AlarmName": waking_name(name),
        **_metric(name, "HasBacklogWithoutCapacity"),
        "Statistic": "Average",
        "Period": 60,
        "EvaluationPeriods": 2,
        "DatapointsToAlarm": 2,
        "Threshold": 1.0,
        "ComparisonOperator": "GreaterThanOrEqualToThreshold",
        "TreatMissingData": "missing",
    }


def waking_name(name: str) -> str:
    return f"{name}-from-none"


def _metric(name: str, metric: str) -> dict[str, Any]:
    return {"Namespace": "AWS/SageMaker", "MetricName": metric, "Dimensions": [{"Name": "EndpointName", "Value": name}]}


_POLL_S, _POLLS = 15, 120
_MISSING = ("NoSuchKey", "NoSuchBucket")
# SageMaker has no error code of its own for missing objects.
_MISSING_WORDS = ("could not find", "cannot find", "no scalable target")


class SageMakerTarget:
    """Steps by boto3, with the account and region of its usual configuration."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        image: str = "",
        role: str = "",
        bucket: str = "",
        instance_type: str = "ml.c5.xlarge",
        asynchronous: str = "",
    ) -> None:
        """`bucket`, `asynchronous`: s3://BUCKET/PREFIX for the bundle, and for results. Raises SetupError."""
        for name, value in (("image", image), ("role", role), ("bucket", bucket)):
            if not value:
                raise SetupError(f"{name}: is needed for --to sagemaker; see --{name}")
        if endpoint.backend != "openvino":
            raise SetupError(f"backend {endpoint.backend!r}: the image sagemaker has openvino")
        serverless, count = endpoint.serverless, endpoint.min_executors
        if serverless and asynchronous:
            raise SetupError("an endpoint is serverless or asynchronous, not both: see --memory-mb and --asynchronous")
        if serverless and endpoint.max_executors > 1:
            raise SetupError("max: a serverless endpoint scales by itself up to --max-concurrency; leave out --max")
        if not count and not (serverless or asynchronous):
            raise SetupError("min: 0, but a real-time endpoint has at least one instance; see --memory-mb")
        self._endpoint = endpoint
        self._image, self._role = image, role
        self._instance_type, self._results = instance_type, asynchronous
        self._object = _below(bucket, f"{endpoint.name}/model.tar.gz")
        self.name = endpoint.name
        # The folder of an asynchronous endpoint's waiting requests.
        self.inputs = _below(bucket, f"{endpoint.name}/inputs") if asynchronous else None

    def deploying(self) -> Iterator[DeployStep]:
        """Creates everything, and waits until the endpoint is in service. Raises SetupError."""
        endpoint, name = self._endpoint, self._endpoint.name
        yield DeployStep(f"compile {endpoint.source}, and upload it as {self._object}", self._upload)
        yield _call("sagemaker", "create_model", self.model)
        yield _call("sagemaker", "create_endpoint_config", self.configuration)
        yield _call("sagemaker", "create_endpoint", {"EndpointName": name, "EndpointConfigName": name})
        yield DeployStep(f"wait until the endpoint {name} is in service", self._wait)
        if not endpoint.serverless and endpoint.min_executors != endpoint.max_executors:
            counts = {"MinCapacity": endpoint.min_executors, "MaxCapacity": endpoint.max_executors}
            yield _call("application-autoscaling", "register_scalable_target", scaled_variant(name) | counts)
            policy = policy_by_load(name, is_asynchronous=bool(self._results))
            yield _call("application-autoscaling", "put_scaling_policy", policy)
            if not endpoint.min_executors:
                yield _waking(policy_from_none(name), alarm_of_none(name))

    def call(self) -> str:
        common = f"--endpoint-name {self._endpoint.name} --content-type application/json"
        if self._results:
            return f"aws sagemaker-runtime invoke-endpoint-async --input-location S3-URI {common}"
        # From a file: version 2 of the program takes base64 on its command line.
        asking = f"aws sagemaker-runtime invoke-endpoint {common} --body fileb://request.json answer.json"
        return f'echo \'{{"inputs": "TEXT"}}\' > request.json\n{asking}'

    @property
    def model(self) -> Mapping[str, Any]:
        serverless = self._endpoint.serverless
        limit = {"NEURONPIPE_ALL_MAX_REQUESTS_IN_FLIGHT": str(serverless.max_concurrency)} if serverless else {}
        return {
            "ModelName": self._endpoint.name,
            "ExecutionRoleArn": self._role,
            "PrimaryContainer": {
                "Image": self._image,
                "ModelDataUrl": str(self._object),
                "Environment": {"NEURONPIPE_ALL_DEFAULT_MODELS": model_name(self._endpoint), **limit},
            },
        }

    @property
    def configuration(self) -> Mapping[str, Any]:
        name, serverless, count = self._endpoint.name, self._endpoint.serverless, self._endpoint.min_executors
        variant: dict[str, Any] = {"VariantName": VARIANT, "ModelName": name}
        if serverless:
            limits = {"MemorySizeInMB": serverless.memory_mb, "MaxConcurrency": serverless.max_concurrency}
            variant["ServerlessConfig"] = limits
        else:
            # An asynchronous endpoint may have no instance, but begins with an instance, which autoscaling removes.
            variant |= {"InstanceType": self._instance_type, "InitialInstanceCount": max(count, 1)}
        arguments: dict[str, Any] = {"EndpointConfigName": name, "ProductionVariants": [variant]}
        if results := self._results:
            # Without the second folder a caller cannot tell a failed request from a waiting request.
            folders = {"S3OutputPath": results, "S3FailurePath": f"{results.rstrip('/')}/failures"}
            arguments["AsyncInferenceConfig"] = {"OutputConfig": folders}
        return arguments

    def _upload(self) -> None:
        storage = service("s3")
        with tempfile.TemporaryDirectory(prefix="neuronpipe-") as folder:
            bundle = make_bundle(self._endpoint, Path(folder) / "models", lambda line: None)
            packed = Path(folder) / "model.tar.gz"
            with tarfile.open(packed, "w:gz") as tar:
                tar.add(bundle.folder, ".")
            with failures("s3"):
                storage.upload_file(str(packed), self._object.bucket, self._object.path)

    def _wait(self) -> None:
        with failures("sagemaker"):
            waiter = service("sagemaker").get_waiter("endpoint_in_service")
            waiter.wait(EndpointName=self._endpoint.name, WaiterConfig={"Delay": _POLL_S, "MaxAttempts": _POLLS})


def undeploying(name: str) -> Iterator[DeployStep]:
    """Deletes the endpoint, its configuration, its scaling with its alarm, the model, and the bundle of the model."""
    scaled = scaled_variant(name)
    yield _call("application-autoscaling", "deregister_scalable_target", scaled, allows_missing=True)
    yield _call("sagemaker", "delete_endpoint", {"EndpointName": name}, allows_missing=True)
    yield _call("sagemaker", "delete_endpoint_config", {"EndpointConfigName": name}, allows_missing=True)
    yield DeployStep(f"delete the bundle of the model {name}", lambda: _delete_bundle(name))
    yield _call("sagemaker", "delete_model", {"ModelName": name}, allows_missing=True)
    yield _call("cloudwatch", "delete_alarms", {"AlarmNames": [waking_name(name)]}, allows_missing=True)


def _delete_bundle(name: str) -> None:
    with failures("sagemaker", allows_missing=True):
        model = service("sagemaker").describe_model(ModelName=name)
        uri = ObjectUri.parse(model["PrimaryContainer"]["ModelDataUrl"])
        service("s3").delete_object(Bucket=uri.bucket, Key=uri.path)


def _waking(policy: Mapping[str, Any], alarm: Mapping[str, Any]) -> DeployStep:
    """Returns a step that makes the alarm carry out the policy."""

    def run() -> None:
        scaling, metrics = service("application-autoscaling"), service("cloudwatch")
        with failures("application-autoscaling"):
            action = scaling.put_scaling_policy(**policy)["PolicyARN"]
        with failures("cloudwatch"):
            metrics.put_metric_alarm(**alarm, AlarmActions=[action])

    calls = ("application-autoscaling put_scaling_policy", policy), ("cloudwatch put_metric_alarm, for it", alarm)
    return DeployStep("\n".join(f"{call}:\n{_lines(arguments)}" for call, arguments in calls), run)


def service(name: str) -> Any:
    try:
        import boto3
    except ModuleNotFoundError as error:
        raise SetupError(
            "--to sagemaker needs boto3, which is not installed: pip install 'neuronpipe[deploy]'"
        ) from error
    with failures(name):
        return boto3.client(name)


@contextmanager
def failures(name: str, *, allows_missing: bool = False) -> Iterator[None]:
    """Turns AWS's refusals in the block into SetupError. `allows_missing`: missing objects are no error."""
    from boto3.exceptions import Boto3Error  # the error of a refused upload
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except ClientError as error:
        code, message = error.response["Error"]["Code"], error.response["Error"]["Message"]
        is_missing = "NotFound" in code or code in _MISSING or message.lower().startswith(_MISSING_WORDS)
        if not (allows_missing and is_missing):
            raise SetupError(f"{name}: {code}: {message}") from error
    except (Boto3Error, BotoCoreError) as error:
        raise SetupError(f"{name}: {error}") from error


def _call(
    service_name: str, operation: str, arguments: Mapping[str, Any], *, allows_missing: bool = False
) -> DeployStep:
    def run() -> None:
        client = service(service_name)
        with failures(service_name, allows_missing=allows_missing):
            getattr(client, operation)(**arguments)

    return DeployStep(f"{service_name} {operation}:\n{_lines(arguments)}", run)


def _lines(arguments: Mapping[str, Any]) -> str:
    return "\n".join(f"    {name}: {value}" for name, value in arguments.items())


def _below(folder: str, name: str) -> ObjectUri:
    """Returns the URI of a name below a folder of S3. Raises SetupError."""
    try:
        uri = ObjectUri.parse(folder)
    except ValueError as error:
        raise SetupError(f"bucket {folder!r}: {error}") from error
    if not uri.bucket:
        raise SetupError(f"bucket {folder!r}: must begin with s3://")
    prefix = uri.path.strip("/")
    return ObjectUri(uri.bucket, f"{prefix}/{name}" if prefix else name)
