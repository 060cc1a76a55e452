"""The types of which the bodies of requests are made."""

from collections.abc import Mapping, Sequence, Set
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AliasChoices, BaseModel, ConfigDict, Discriminator, Field, Tag
from pydantic.functional_validators import AfterValidator, BeforeValidator, model_validator
from pydantic_core import PydanticCustomError

from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.generation_options import Option, OptionKind
from neuronpipe.doors.http.bodies import UNKNOWN, read_image
from neuronpipe.doors.http.unknown_fields import HARMLESS, UnknownFields

# The characters of an unknown field that are compared with known fields, and the likeness of a field to suggest.
_LONGEST_NAME, _LIKENESS = 64, 0.8


class Body(BaseModel):
    """The base of all bodies of requests, and of their parts.

    A field that the body does not have is refused by its name, unless it is among `harmless`: to ignore it would
    mislead the caller. The request may ask for another rule. A field that is null counts as missing.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    harmless: ClassVar[frozenset[str]] = HARMLESS

    _known: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        field_names: set[str] = set()
        for name, field in cls.model_fields.items():
            alias = field.validation_alias
            field_names.update(map(str, alias.choices if isinstance(alias, AliasChoices) else [alias or name]))
        cls._known = frozenset(field_names)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        value = without_nulls(value)
        extra = cls.model_config["extra"]
        if not isinstance(value, dict) or value.keys() <= cls._known or extra == "allow":
            return value
        known_fields = {name: inner for name, inner in value.items() if name in cls._known}
        unknown_fields = UnknownFields.current()
        for name in value:
            if name in known_fields:
                continue
            # The first unknown field is the only error: the errors of all unknown fields could take gigabytes.
            if not unknown_fields.ignore(name, is_harmless=extra == "ignore" or name in cls.harmless):
                near = get_close_matches(name[:_LONGEST_NAME], cls._known, 1, _LIKENESS)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise PydanticCustomError(UNKNOWN, "is not supported{hint}", {"field": name, "hint": hint})
        return known_fields


class ModelBody(Body):
    """A body that may name its model."""

    model: str | None = None


def without_nulls(value: Any) -> Any:
    """Returns an object in JSON without the fields that are null, as clients write fields that they do not set."""
    if isinstance(value, dict) and None in value.values():
        return {name: inner for name, inner in value.items() if inner is not None}
    return value


def only(*values: Any, advice: str = "") -> AfterValidator:
    """Returns the check of a field that is not supported, but that clients send with values that change nothing.

    `advice`: the end of the error.
    """

    def refuse(value: Any) -> None:
        if value is not None and without_nulls(value) not in values:
            raise ValueError(f"is not supported; {advice}" if advice else "is not supported")

    return AfterValidator(refuse)


def fixed(**values: Any) -> dict[str, tuple[Any, Any]]:
    """Returns fields that are not supported, each with the value of clients that changes nothing; see `with_fields`."""
    return {name: (Annotated[Any, only(value)], None) for name, value in values.items()}


ElementT = TypeVar("ElementT")
# A list whose first wrong item is its only error: the errors of 64 MiB of wrong items would take gigabytes.
Many = Annotated[list[ElementT], Field(fail_fast=True)]
# Accepts 5.0 as 5, because some languages write each number with a fraction. In an annotation it follows the bounds,
# which schemas would lose otherwise.
WHOLE = BeforeValidator(lambda value: int(value) if isinstance(value, float) and value.is_integer() else value)
Count = Annotated[int, Field(ge=1, lt=1 << 32), WHOLE]


def _check_kept(tokens: int) -> int:
    if tokens == -1 or 1 <= tokens < 1 << 32:
        return tokens
    raise ValueError("must be 1 or more, or -1 for as many as the model takes")


# vLLM's truncate_prompt_tokens. -1 keeps as many tokens as the model takes.
KeptTokens = Annotated[int, Field(json_schema_extra={"minimum": -1}), AfterValidator(_check_kept), WHOLE]
Whole = Annotated[int, Field(ge=0, lt=1 << 32), WHOLE]
# The token ids of a text: more than any model takes, and few enough to be converted on the event loop in about 10 ms.
TokenIds = Annotated[
    list[Annotated[int, Field(ge=0, lt=1 << 32)]], Field(fail_fast=True, min_length=1, max_length=1 << 16)
]
TextsOrTokens = Annotated[
    str | Many[str] | TokenIds | Many[TokenIds],
    Field(description="a text, or several; or instead of each text its ids of the model's own tokenizer"),
]


class Address(Body):
    harmless = HARMLESS | {"detail"}

    url: str


class Part(Body):
    """A text or an image in Base64: `text` or `image` of Jina, or a part of OpenAI's, vLLM's and Cohere's contents."""

    type: Literal["text", "image_url", "input_text", "input_image"] | None = None
    text: str | None = None
    image: str | None = None
    image_url: str | Address | None = None

    @property
    def value(self) -> str | bytes:
        """The text, or the bytes of the image. Raises InvalidInput."""
        if len({"text", "image", "image_url"} & self.model_fields_set) != 1:
            raise InvalidInput("text", "a part must have one of text, image and image_url")
        if self.text is not None:
            return self.text
        image = self.image_url or self.image or ""
        return read_image(image.url if isinstance(image, Address) else image)


_FORMS: Mapping[OptionKind, Any] = {
    "float": float,
    "bool": bool,
    "words": bool | Literal["never"],
    "token": Whole,
    "text": str,
    "json": str | dict[str, Any],
    "texts": str | Many[str],
    "tokens": Many[Whole],
    "sequences": Many[TokenIds],
    "biases": Annotated[dict[Annotated[str, Field(pattern="^[0-9]{1,10}$")], float], Field(max_length=1 << 16)],
}


def option_field(option: Option) -> tuple[Any, Any]:
    """Returns the field of an option of generation: its type and its default. Tasks check the bounds of its value."""
    minimum, maximum = int(max(option.minimum, 0)), (1 << (64 if option.maximum > 1 << 32 else 32)) - 1
    form = Annotated[int, Field(ge=minimum, le=maximum), WHOLE] if option.kind == "int" else _FORMS[option.kind]
    return form | None, Field(None, description=option.text)


# OpenAI's developer is the system in templates, of which some leave out a role that they do not know.
Role = Annotated[str, AfterValidator(lambda role: "system" if role == "developer" else role)]
Direction = Literal["Right", "Left", "right", "left"]


def either(first: type[Body], second: type[Body], marks: Set[str], description: str) -> Any:
    """Returns the type of a body that is `second` if it has any of the fields in `marks`, and else `first`."""

    def tag(body: Any) -> str:
        is_second = not marks.isdisjoint(body) if isinstance(body, dict) else isinstance(body, second)
        return "second" if is_second else "first"

    union = Annotated[first, Tag("first")] | Annotated[second, Tag("second")]  # type: ignore[valid-type]
    return Annotated[union, Discriminator(tag), Field(description=description)]


def embedding_task(inputs: Sequence[Any]) -> str:
    """Returns the task of a model that makes vectors of these inputs: images alone, or also texts."""
    is_image = inputs and all(isinstance(part, Part) and part.text is None for part in inputs)
    return "image_embedding" if is_image else "sentence_embedding"


def texts_of(texts: str | list[str]) -> list[str]:
    """Returns a text, or several, as a list."""
    return [texts] if isinstance(texts, str) else texts
