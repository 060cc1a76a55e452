"""A file for each task, or for similar tasks. They encode inputs and decode outputs, without a model or a network."""

from importlib import import_module

from neuronpipe.api.v1.tasks_pb2 import TaskInput
from neuronpipe.tasks.base import Task

# The file of each task that shares a file.
_FILES = {
    "detokenization": "tokenization",
    "image_classification": "images",
    "image_embedding": "images",
    "summarization": "text_to_text",
    "translation": "text_to_text",
}


def _declared(name: str) -> Task:
    """The task of a field of TaskInput."""
    module = import_module(f"{__name__}.{_FILES.get(name, name)}")
    return next(value for value in vars(module).values() if isinstance(value, Task) and value.name == name)


ANSWERED_TASKS: dict[str, Task] = {field.name: _declared(field.name) for field in TaskInput.DESCRIPTOR.fields}
# The tasks for which models are compiled. Every model of texts also answers the other tasks.
TASKS: dict[str, Task] = {name: task for name, task in ANSWERED_TASKS.items() if task.has_graph}
