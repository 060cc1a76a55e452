"""The bundle of an endpoint, made on this machine."""

from collections.abc import Callable
from pathlib import Path

from neuronpipe.bundles.manifest import MANIFEST_FILE
from neuronpipe.bundles.repository import Bundle, read_repository
from neuronpipe.core.errors import SetupError
from neuronpipe.deploy.endpoint import Endpoint


def given_bundle(endpoint: Endpoint) -> Bundle | None:
    """The bundle that the source is; None for a source that must be compiled. Raises SetupError."""
    if endpoint.folder is None or not (endpoint.folder / MANIFEST_FILE).is_file():
        return None
    [bundle] = read_repository(endpoint.folder)
    return bundle


def model_name(endpoint: Endpoint) -> str:
    """The name by which callers ask for the model."""
    bundle = given_bundle(endpoint)
    return bundle.spec.name if bundle else endpoint.name


def make_bundle(endpoint: Endpoint, repository: Path, report: Callable[[str], None]) -> Bundle:
    """The bundle that the source is, or else the source compiled into a repository. Raises SetupError."""
    if bundle := given_bundle(endpoint):
        return bundle
    try:
        from neuronpipe.compiler import CompileRequest, compile_bundle
    except ModuleNotFoundError as error:
        raise SetupError(
            f"{endpoint.source}: to compile it here, {error.name} is needed: pip install 'neuronpipe[compile]'"
        ) from error
    request = CompileRequest(
        source=endpoint.source,
        task=endpoint.task.replace("-", "_"),
        repository=repository,
        name=endpoint.name,
        backend=endpoint.backend,
        dtype=endpoint.dtype,
    )
    return compile_bundle(request, report)
