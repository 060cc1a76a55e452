"""Inputs and results whose messages are written as mappings, as protobuf takes them."""

from typing import Any

from neuronpipe.api.v1.tasks_pb2 import TaskInput, TaskResult


def task_input(**task: Any) -> TaskInput:
    """The input of a task."""
    return TaskInput(**task)


def task_result(**task: Any) -> TaskResult:
    """The result of a task."""
    return TaskResult(**task)
