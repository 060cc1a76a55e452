"""The most requests of a model that are in flight at once, of models that have such a limit."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

from neuronpipe.core.errors import Overloaded
from neuronpipe.gateway.load_shedding import DrainRate

_MAX_LIMIT = 1_000_000


def parse_limits(written: str) -> dict[str, int]:
    """The limits of models, by name, of the form "minilm=10,other=200". Raises ValueError."""
    limits: dict[str, int] = {}
    for part in filter(None, map(str.strip, written.split(","))):
        name, _, number = part.rpartition("=")
        if not name or name in limits:
            raise ValueError(f"{part!r}: must be MODEL=NUMBER, once for a model")
        if not (number.isascii() and number.isdigit() and 0 < int(number[:8]) <= _MAX_LIMIT):
            raise ValueError(f"{part!r}: the number must be from 1 to {_MAX_LIMIT}")
        limits[name] = int(number)
    return limits


class ModelConcurrency:
    """Counts requests in and out. All versions of a model count together."""

    def __init__(self, limits: Mapping[str, int]) -> None:
        self._places = {name: _Places(name, limit) for name, limit in limits.items()}

    def place(self, model: str) -> AbstractContextManager[None]:
        """A place for as long as the block runs. Raises Overloaded where the model has none left."""
        places = self._places.get(model)
        return places.take() if places else nullcontext()


class _Places:
    """The places of one model."""

    def __init__(self, model: str, limit: int) -> None:
        self._model, self._limit = model, limit
        self._taken = 0
        self._drained = DrainRate()

    @contextmanager
    def take(self) -> Iterator[None]:
        if self._taken >= self._limit:
            problem = f"model {self._model!r}: {self._taken} requests in flight, the limit is {self._limit}"
            raise Overloaded(problem, self._drained.retry_after_s(1, 0))
        self._taken += 1
        try:
            yield
        finally:
            self._taken -= 1
            self._drained.add(1, 0)
