"""How an endpoint of SageMaker is scaled: what Application Auto Scaling and CloudWatch are given.

https://docs.aws.amazon.com/sagemaker/latest/dg/async-inference-autoscale.html
"""

from typing import Any

# Per instance: five requests that wait, as AWS's own example has it, or a thousand calls in a minute.
_WAITING, _CALLS = 5.0, 1000.0


def scaled_variant(name: str, variant: str) -> dict[str, Any]:
    """What is scaled: the instances of a variant of the endpoint of that name."""
    return {
        "ServiceNamespace": "sagemaker",
        "ResourceId": f"endpoint/{name}/variant/{variant}",
        "ScalableDimension": "sagemaker:variant:DesiredInstanceCount",
    }


def policy_by_load(name: str, variant: str, *, is_asynchronous: bool) -> dict[str, Any]:
    """PutScalingPolicy's arguments: by requests that wait, or by those that come."""
    backlog = {
        "CustomizedMetricSpecification": {
            **_metric(name, "ApproximateBacklogSizePerInstance"),
            "Statistic": "Average",
        }
    }
    invocations = {"PredefinedMetricSpecification": {"PredefinedMetricType": "SageMakerVariantInvocationsPerInstance"}}
    return scaled_variant(name, variant) | {
        "PolicyName": name,
        "PolicyType": "TargetTrackingScaling",
        "TargetTrackingScalingPolicyConfiguration": {
            "TargetValue": _WAITING if is_asynchronous else _CALLS,
            **(backlog if is_asynchronous else invocations),
        },
    }


def policy_from_none(name: str, variant: str) -> dict[str, Any]:
    """PutScalingPolicy's arguments for the first instance of an asynchronous endpoint: where there is none,
    `policy_by_load` waits for more requests than its target.
    """
    return scaled_variant(name, variant) | {
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
    """PutMetricAlarm's arguments, but for its action: for two minutes requests have waited without an instance."""
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
    """The name of that policy and of its alarm."""
    return f"{name}-from-none"


def _metric(name: str, metric: str) -> dict[str, Any]:
    return {
        "Namespace": "AWS/SageMaker",
        "MetricName": metric,
        "Dimensions": [{"Name": "EndpointName", "Value": name}],
    }
