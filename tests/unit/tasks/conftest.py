"""What holds of every error of a task."""

import re
from collections.abc import Iterator, Sequence

import pytest

from neuronpipe.api.v1.tasks_pb2 import GenerationOptions, TaskInput
from neuronpipe.core.errors import CUT, InvalidInput

_INPUTS = [field.message_type for field in TaskInput.DESCRIPTOR.fields if field.message_type]
_FIELDS = {field.name for message in (*_INPUTS, GenerationOptions.DESCRIPTOR) for field in message.fields}


def _named(problem: str) -> list[str]:
    """The fields that a problem names, and the advice to cut, in order. A plain word may mean no field."""
    words = re.findall(rf"{CUT}|\b[a-z]+(?:_[a-z]+)+\b", problem)
    return ["truncation" if word == CUT else word for word in words if word == CUT or word in _FIELDS]


@pytest.fixture(autouse=True)
def each_error_mentions_as_data_what_its_problem_names(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    make, wrong = InvalidInput.__init__, []

    def check(error: InvalidInput, field: str, problem: str, mentions: Sequence[str] = ()) -> None:
        make(error, field, problem, mentions)
        last_words = [mention.rpartition(".")[2] for mention in mentions]
        if _named(problem) != [word for word in last_words if "_" in word or word == "truncation"]:
            wrong.append((problem, mentions))

    monkeypatch.setattr(InvalidInput, "__init__", check)
    yield
    assert not wrong
