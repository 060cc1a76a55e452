"""A gateway that knows its callers: its files, and what it accepts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from neuronpipe.core.errors import NeuronpipeError
from neuronpipe.gateway.callers.keys import create_key
from tests.servers.token_issuer import AUDIENCE, ISSUER, Issuer
from tests.systems.http_server import HttpServer, running_http_server

_TENANTS = """
[tenants.search]
models = ["minilm", "reranker"]

[tenants.labels]
models = ["classifier", "unknown"]
"""


@dataclass(frozen=True)
class Files:
    """Files that a gateway is started with. `search`, `labels`: a key of each of the two tenants."""

    folder: Path
    issuer: Issuer
    search: str
    labels: str

    @property
    def keys(self) -> Path:
        return self.folder / "keys"

    @property
    def jwks(self) -> Path:
        return self.folder / "jwks"

    @property
    def tenants(self) -> Path:
        return self.folder / "tenants.toml"

    @property
    def options(self) -> list[str]:
        tokens = ["--jwks", str(self.jwks), "--jwt-issuer", ISSUER, "--jwt-audience", AUDIENCE]
        return ["--api-keys", str(self.keys), "--tenants", str(self.tenants), *tokens]


def make_files(folder: Path, tenants: str = _TENANTS) -> Files:
    """Makes two tenants, a key of each tenant, and an issuer of tokens."""
    folder.mkdir(exist_ok=True)
    issuer = Issuer()
    (folder / "jwks").write_bytes(issuer.jwks())
    (folder / "tenants.toml").write_text(tenants)
    keys = folder / "keys"
    return Files(folder, issuer, create_key(keys, "search", "ann"), create_key(keys, "labels", "bob"))


def registry_callers(folder: Path) -> tuple[dict[str, str], list[str]]:
    """Makes tenants with and without the right to change the registry. Returns their keys and the options of files."""
    tenants = ("[tenants.ops]", "manages_registry = true", "[tenants.app]")
    another = ("[tenants.other]", "models = ['another']", "manages_registry = true")
    (folder / "tenants.toml").write_text("\n".join((*tenants, *another)))
    keys = {name: create_key(folder / "keys", name, "ann") for name in ("ops", "app", "other")}
    return keys, ["--api-keys", str(folder / "keys"), "--tenants", str(folder / "tenants.toml")]


@dataclass(frozen=True)
class Guarded:
    """A process with both doors, and its files."""

    server: HttpServer
    files: Files

    @property
    def target(self) -> str:
        return self.server.process.target

    @property
    def log(self) -> str:
        return str(self.server.process.events())


@contextmanager
def guarded_server(repository: Path, files: Files, *options: str) -> Iterator[Guarded]:
    """Runs `serve all` with authentication."""
    with running_http_server(repository, *files.options, *options) as server:
        yield Guarded(server, files)


def fails_with(kind: type[NeuronpipeError], call: Callable[[], object]) -> bool:
    """Returns whether a call fails with such an error."""
    try:
        call()
    except kind:
        return True
    return False
