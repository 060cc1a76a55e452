"""Every case that fails, with its reason. The tests fail for a case that fails and is not here, and for one that is
here and does not.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Known:
    """A failure. "*" stands for every client. `is_certain`: False where it depends on timing."""

    client: str
    cases: tuple[str, ...]
    reason: str
    is_certain: bool = True

    def is_of(self, client: str, case: str) -> bool:
        """Whether it is this case's."""
        return case in self.cases and self.client in ("*", client)


_KNOWN = (
    Known(
        "grpcio, HAProxy",
        ("message beyond the limit", "answer before the request has ended"),
        "HAProxy 2.6 takes the RST_STREAM behind an early answer for an error",
        is_certain=False,
    ),
    Known(
        "grpcio, HAProxy",
        ("100 KiB of metadata", "100 KiB of metadata in one value"),
        "HAProxy ends the connection for a head of more than its buffer, 16 KiB",
        is_certain=False,
    ),
    Known(
        "grpcio, Envoy",
        ("100 KiB of metadata in one value",),
        "Envoy decodes values of at most 64 KiB, and ends the connection for a longer one",
    ),
    Known(
        "grpcio, nginx",
        ("100 KiB of metadata in one value",),
        "nginx ends the connection for a field that is larger than its buffer",
    ),
    Known(
        "*",
        ("100 KiB of metadata in one value",),
        "nghttp2 decodes values of at most 64 KiB, and ends the connection for a longer one",
        is_certain=False,  # some clients refuse it themselves
    ),
    Known(
        "curl",
        ("unknown method", "unknown encoding", "message beyond the limit", "answer before the request has ended"),
        "curl 7.88 takes the RST_STREAM behind an early answer for an error",
        is_certain=False,
    ),
)


def known_of(client: str, case: str) -> Known | None:
    """Why a case fails; None for one that must not."""
    return next((known for known in _KNOWN if known.is_of(client, case)), None)
