"""Types of bodies in the JSON of our own protobuf messages, made of the messages and of the comments in the protos.

https://protobuf.dev/programming-guides/json/. Names may be snake_case or lowerCamelCase.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal, Self

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from pydantic import AliasChoices, BeforeValidator, Field, WithJsonSchema, create_model, model_validator

from neuronpipe.api.protos import field_comments
from neuronpipe.doors.http.bodies import read_base64
from neuronpipe.doors.http.body_types import WHOLE, Body, Many

_MAX_UINT64 = (1 << 64) - 1


class MessageBody(Body):
    """A message, which refuses unknown fields as gRPC's tools do. `one_of`: fields that exclude each other."""

    harmless = frozenset()
    one_of: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="after")
    def _check_one_of(self) -> Self:
        set_fields = sorted(self.model_fields_set & self.one_of)
        if len(set_fields) > 1:
            raise ValueError(f"has {' and '.join(set_fields)}, takes one of them")
        return self

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments with which its class makes the message."""
        return self.model_dump(exclude_unset=True)


def _read_uint64(value: object) -> int:
    if type(value) is int:  # callers write small numbers so
        value = str(value)
    if not isinstance(value, str) or not (value.isascii() and value.isdigit()):
        raise ValueError("must be a string of digits")
    if len(value) > len(str(_MAX_UINT64)) or int(value) > _MAX_UINT64:
        raise ValueError(f"must be at most {_MAX_UINT64}")
    return int(value)


_KINDS: Mapping[int, Any] = {
    FieldDescriptor.TYPE_STRING: str,
    FieldDescriptor.TYPE_BOOL: bool,
    FieldDescriptor.TYPE_BYTES: Annotated[
        bytes,
        BeforeValidator(lambda value: read_base64(str(value))),
        WithJsonSchema({"type": "string", "contentEncoding": "base64"}),
    ],
    FieldDescriptor.TYPE_UINT32: Annotated[int, Field(ge=0, lt=1 << 32), WHOLE],
    # A string, because readers of JSON lose digits of large numbers.
    FieldDescriptor.TYPE_UINT64: Annotated[
        int, BeforeValidator(_read_uint64), WithJsonSchema({"type": "string", "pattern": r"^\d+$"})
    ],
    FieldDescriptor.TYPE_FLOAT: float,
    FieldDescriptor.TYPE_DOUBLE: float,
}


@lru_cache
def message_body(message: Descriptor) -> type[MessageBody]:
    """Returns the type of a message's JSON."""
    comments = field_comments()
    fields: dict[str, Any] = {}
    for field in message.fields:
        names = AliasChoices(field.name, field.json_name)
        text = comments[f"{message.name}.{field.name}"]
        kind: Any = message_body(field.message_type) if field.message_type else _KINDS.get(field.type)
        if field.enum_type:
            kind = Literal[tuple(value.name for value in field.enum_type.values)]
        declared = Field(default_factory=lambda: None, validation_alias=names, description=text)
        fields[field.name] = (Many[kind] if field.is_repeated else kind, declared)
    body = create_model(message.name, __base__=MessageBody, **fields)
    # An optional field is in a oneof of its own.
    oneofs = (oneof for oneof in message.oneofs if len(oneof.fields) > 1)
    body.one_of = frozenset(field.name for oneof in oneofs for field in oneof.fields)
    return body
