"""Bodies whose fields have several names, because several protocols share a path: errors say the name that was sent."""

from collections.abc import Mapping, Set
from typing import Any, ClassVar, Self

from pydantic import AliasChoices, ModelWrapValidatorHandler, PrivateAttr, model_validator

from neuronpipe.core.errors import InvalidInput
from neuronpipe.doors.http.body_types import ModelBody
from neuronpipe.doors.inference import FieldNames


class AliasedBody(ModelBody):
    """A body that keeps the names by which the request sent its fields. Two names of a field are refused together."""

    _names_by_field: ClassVar[Mapping[str, list[str]]] = {}
    _sent: Mapping[str, str] = PrivateAttr(default_factory=dict)

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        aliases = {field: info.validation_alias for field, info in cls.model_fields.items()}
        cls._names_by_field = {
            field: [*map(str, alias.choices)] for field, alias in aliases.items() if isinstance(alias, AliasChoices)
        }

    @model_validator(mode="wrap")
    @classmethod
    def _keep_names(cls, value: Any, make: ModelWrapValidatorHandler[Self]) -> Self:
        sent: dict[str, str] = {}
        for field, names in cls._names_by_field.items() if isinstance(value, dict) else ():
            for name in names:
                if value.get(name) is None:
                    continue
                if field in sent:
                    raise InvalidInput(name, f"says the same as {sent[field]}; send one of them")
                sent[field] = name
        body = make(value)
        body._sent = sent
        return body

    def sent_name(self, field: str) -> str:
        """Returns the name by which the request sent a field, or else the field's own name."""
        return self._sent.get(field, field)

    @property
    def sent_names(self) -> Set[str]:
        """The names of all fields of the request."""
        return {self.sent_name(field) for field in self.model_fields_set}

    def sent_fields(self, fields: FieldNames) -> FieldNames:
        """Returns a protocol's names for the fields of an input, as the request sent them."""
        return {ours: self.sent_name(theirs) for ours, theirs in fields.items()}
