"""Reads inputs of tasks from JSON, with error messages that name the valid fields and values."""

import difflib
import json
from typing import Any

from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor

from neuronpipe.api.v1.tasks_pb2 import TaskInput
from neuronpipe.core.errors import SetupError
from neuronpipe.core.task_inputs import SAMPLES


def read_task_input(text: str) -> TaskInput:
    """Reads an input from JSON.

    Task names may have hyphens, and enum values their short names in either case, as in {"text-classification":
    {"truncation": "right"}}. Raises SetupError, whose message names the wrong part and valid values.
    """
    try:
        return json_format.ParseDict(
            _as_protobuf(json.loads(text, object_pairs_hook=_object), TaskInput.DESCRIPTOR, ""), TaskInput()
        )
    except (json_format.ParseError, ValueError) as error:
        raise SetupError(str(error)) from error


def _object(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    unique_fields = dict(fields)
    if len(unique_fields) < len(fields):
        raise ValueError("a field is given twice")
    return unique_fields


def _as_protobuf(value: object, kind: Descriptor, path: str) -> dict[str, Any]:
    """Converts a message's JSON to the names of protobuf. Raises SetupError."""
    if not isinstance(value, dict):
        example = SAMPLES[path] if path else {"text_classification": {"text": "A fine day."}}
        raise SetupError(f"{path and path + ': '}must be an object, such as {json.dumps(example)}")
    converted = {}
    for name, element in value.items():
        field = kind.fields_by_name.get(name.replace("-", "_")) or kind.fields_by_camelcase_name.get(name)
        if field is None:
            raise SetupError(
                f"{path and path + ': '}there is no field {name!r}{_suggest(name, list(kind.fields_by_name))}"
            )
        if field.name in converted:
            raise SetupError(f"{path and path + ': '}the field {field.name!r} is given twice")
        converted[field.name] = _as_value(element, field, f"{path}.{field.name}" if path else field.name)
    return converted


def _as_value(value: object, field: FieldDescriptor, path: str) -> object:
    if field.message_type:
        return _as_protobuf(value, field.message_type, path)
    if field.enum_type and isinstance(value, str):
        return _enum_name(value, field.enum_type, path)
    return value


def _enum_name(word: str, kind: EnumDescriptor, path: str) -> str:
    """Returns the full name of an enum's value: TRUNCATION_RIGHT for "right"."""
    prefix = kind.values_by_number[0].name.removesuffix("UNSPECIFIED")
    words = {name.removeprefix(prefix).lower(): name for name in kind.values_by_name}
    short = word.upper().removeprefix(prefix).lower()
    if short not in words:
        raise SetupError(
            f"{path}: unknown value {word!r}{_suggest(short, [other for other in words if other != 'unspecified'])}"
        )
    return words[short]


def _suggest(word: str, names: list[str]) -> str:
    near = difflib.get_close_matches(word, names, 1)
    return (f"; did you mean {near[0]!r}?" if near else "") + f" (there are: {', '.join(names)})"
