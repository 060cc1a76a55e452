"""A file for each task, or for similar tasks. They encode inputs and decode outputs, without a model or a network."""

from collections.abc import Collection, Iterator, Mapping
from functools import cache
from importlib import import_module

from neuronpipe.api.v1.tasks_pb2 import TaskInput
from neuronpipe.core.model import TOKENIZER_TASKS
from neuronpipe.tasks.base import Task

# The file of each task that shares a file.
_FILES = {
    "detokenization": "tokenization",
    "image_classification": "images",
    "image_embedding": "images",
    "summarization": "text_to_text",
    "translation": "text_to_text",
}


class _Tasks(Mapping[str, Task]):
    """Tasks by name. A process imports the file of a task when it first uses the task."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names

    def __getitem__(self, name: str) -> Task:
        if name not in self._names:
            raise KeyError(name)
        return _declared(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@cache
def _declared(name: str) -> Task:
    module = import_module(f"{__name__}.{_FILES.get(name, name)}")
    return next(value for value in vars(module).values() if isinstance(value, Task) and value.name == name)


ANSWERED_TASKS = _Tasks([field.name for field in TaskInput.DESCRIPTOR.fields])
# The tasks for which models are compiled. Every model of texts also answers the other tasks.
TASKS = _Tasks([name for name in ANSWERED_TASKS if name not in TOKENIZER_TASKS])
