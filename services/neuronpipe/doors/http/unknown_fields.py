"""The rule for fields of a request's body that we do not know, and the header that names the ignored fields."""

from contextvars import ContextVar
from typing import NamedTuple
from urllib.parse import quote

from neuronpipe.core.errors import InvalidInput

# Fields of bodies, at any depth, that change no answer: marks for bills and logs, hints for caches and schedulers.
HARMLESS = frozenset(
    (
        *("user", "metadata", "store", "service_tier", "prediction", "safety_identifier"),  # OpenAI
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "cache_control"),
        *("client_metadata", "session_id", "keep_alive", "ttl", "provider"),  # clients of OpenAI, Ollama, OpenRouter
        *("priority", "request_id", "rid", "cache_salt", "guided_decoding_backend"),  # vLLM, SGLang
        "spaces_between_special_tokens",  # fast tokenizers put no spaces there
        *("cache_prompt", "padding"),  # llama.cpp, transformers
    )
)
# Maximum number of names in the header of ignored fields, and of characters of a name.
_MAX_IGNORED, _MAX_IGNORED_CHARS = 32, 64
_STRICTNESS = {"": None, "true": True, "false": False}


class UnknownFields(NamedTuple):
    """The rule for unknown fields of a request's body, and the names of the fields that were ignored.

    `is_strict`: True: all are refused; False: all are ignored; None: harmless fields are ignored, others are refused.
    """

    is_strict: bool | None
    ignored: dict[str, None]

    @classmethod
    def enter(cls, strict: str = "") -> None:
        """Sets the rule of the running task by the request's word for `is_strict`. Raises InvalidInput."""
        if strict not in _STRICTNESS:
            raise InvalidInput(STRICT_FIELD, "must be true or false")
        _UNKNOWN_FIELDS.set(cls(_STRICTNESS[strict], {}))

    @classmethod
    def header(cls) -> bytes:
        """Returns the names of the ignored fields, percent-encoded, with commas between; empty if none was ignored."""
        names = [quote(name[:_MAX_IGNORED_CHARS], safe="[]") for name in cls.current().ignored]
        if len(names) > _MAX_IGNORED:
            names[_MAX_IGNORED:] = ["..."]
        return ", ".join(names).encode()

    @classmethod
    def current(cls) -> "UnknownFields":
        """Returns the rule of the running task."""
        return _UNKNOWN_FIELDS.get(None) or cls(None, {})

    def ignore(self, name: str, *, is_harmless: bool) -> bool:
        """Tells whether the body may ignore a field, whose name the header then has."""
        if self.is_strict or not (is_harmless or self.is_strict is False):
            return False
        if len(self.ignored) <= _MAX_IGNORED:
            self.ignored[name] = None
        return True


def ignore(field: str, problem: str = "is not supported") -> None:
    """Adds a known field without effect to the header of ignored fields. Raises InvalidInput in a strict request."""
    if not UnknownFields.current().ignore(field, is_harmless=True):
        raise InvalidInput(field, problem)


STRICT_FIELD = "neuronpipe-strict"
_UNKNOWN_FIELDS: ContextVar[UnknownFields] = ContextVar("neuronpipe_unknown_fields")
