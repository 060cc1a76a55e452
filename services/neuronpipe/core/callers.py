"""The caller of a request, with the facts that a door knows. The running task finds it in a ContextVar."""

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Caller:
    """The identity behind a request, the tenant whose quota counts it, and the callers with whom caches are shared."""

    name: str = ""
    tenant: str = ""
    cache_scope: str = ""


ANONYMOUS = Caller()
_MAX_NAME = 256


def is_tenant_name(name: str) -> bool:
    """Returns whether a tenant's name is valid: it appears in logs, metrics and paths."""
    return 0 < len(name) <= _MAX_NAME and name.isprintable() and name not in (".", "..")


def check_tenant_name(name: str) -> str:
    """Returns the name of a tenant. Raises ValueError if the name is invalid."""
    if not is_tenant_name(name):
        raise ValueError(f"must have from 1 to {_MAX_NAME} characters that can be printed, and be neither . nor ..")
    return name


_CALLER: ContextVar[Caller] = ContextVar("neuronpipe_caller", default=ANONYMOUS)


def enter_caller(caller: Caller) -> None:
    """Sets the caller of the running task. For doors, before they read a message."""
    _CALLER.set(caller)


def current_caller() -> Caller:
    return _CALLER.get()
