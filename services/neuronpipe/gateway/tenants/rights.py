"""The file of the tenants: what each may do."""

import tomllib
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from neuronpipe.core.errors import SetupError

# The entry for tenants that have none of their own.
_OTHERS = "*"


class Rights(BaseModel):
    """What a tenant may do. None: no limit."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    models: frozenset[str] | None = None
    weight: float = Field(1.0, gt=0, le=1_000_000)
    max_requests_in_flight: int | None = Field(None, ge=1)
    max_tokens_in_flight: int | None = Field(None, ge=1)
    tokens_per_minute: int | None = Field(None, ge=1)
    max_jobs: int | None = Field(None, ge=1)
    acts_for_others: bool = False
    manages_registry: bool = False
    highest_priority: Literal["interactive", "bulk"] = "interactive"
    certificates: frozenset[str] = frozenset()


NOTHING = Rights(models=frozenset())
EVERYTHING = Rights()


class TenantBook(BaseModel):
    """All tenants."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tenants: dict[str, Rights]

    def rights_of(self, tenant: str) -> Rights:
        """A tenant's rights: nothing, where the file does not name it."""
        return self.tenants.get(tenant) or self.tenants.get(_OTHERS) or NOTHING

    def tenant_of(self, name: str) -> str:
        """The tenant that a name in a certificate belongs to; empty for none."""
        return next((tenant for tenant, rights in self.tenants.items() if name in rights.certificates), "")


def parse_tenants(content: bytes) -> TenantBook:
    """The tenants of a file. Raises SetupError, which names the place at fault."""
    try:
        return TenantBook.model_validate(tomllib.loads(content.decode()))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SetupError(f"--tenants: is no TOML in UTF-8: {error}") from error
    except ValidationError as error:
        problems = (f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors())
        raise SetupError(f"--tenants: {'; '.join(problems)}") from error
