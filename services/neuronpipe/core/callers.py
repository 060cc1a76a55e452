"""Who asks: what a door knows of a caller, and what the running task finds it by."""

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, and whose quota counts. Without authentication everybody is anonymous.

    `cache_scope`: whose cached values it may get; empty for those that all share.
    """

    name: str = ""
    tenant: str = ""
    cache_scope: str = ""


ANONYMOUS = Caller()
_MAX_NAME = 256


def is_tenant_name(name: str) -> bool:
    """Whether a tenant may be called so: it stands in logs, metrics and paths."""
    return 0 < len(name) <= _MAX_NAME and name.isprintable() and name not in (".", "..")


def check_tenant_name(name: str) -> str:
    """The name of a tenant. Raises ValueError."""
    if not is_tenant_name(name):
        raise ValueError(f"must have from 1 to {_MAX_NAME} characters that can be printed, and be neither . nor ..")
    return name


_CALLER: ContextVar[Caller] = ContextVar("neuronpipe_caller", default=ANONYMOUS)


def enter_caller(caller: Caller) -> None:
    """The running task answers this caller from now on. For doors, before they read a message."""
    _CALLER.set(caller)


def current_caller() -> Caller:
    """The caller whom the running task answers."""
    return _CALLER.get()
