"""The objects that jobs read and write."""

import asyncio
from collections.abc import Callable
from typing import BinaryIO, TypeVar

from neuronpipe.bulk.jobs.job import JobProgress
from neuronpipe.core.errors import InvalidInput, NeuronpipeError, Unavailable
from neuronpipe.core.logs import log_warning
from neuronpipe.platform.process.background import run_apart
from neuronpipe.platform.storage import ObjectUri, Storage, StorageError

ContentT = TypeVar("ContentT")

# Pauses between writes, doubled each time.
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.1, 30.0


class JobObjects:
    """The objects of a worker's jobs. `max_bytes`: the limit of an object that is read.

    Reading raises InvalidInput, and Unavailable for an object that another attempt may be able to read.
    """

    def __init__(self, storage: Storage, max_bytes: int) -> None:
        self._storage, self._max_bytes = storage, max_bytes

    async def open(self, uri: str) -> BinaryIO:
        """Opens an object, which its reader closes."""
        return await self._get(self._storage.open, uri)

    async def read(self, uri: str) -> bytes:
        """Returns the content of an object."""
        return await self._get(self._storage.read, uri)

    async def write(self, uri: str, content: bytes | BinaryIO, progress: JobProgress) -> None:
        """Writes the outcomes of a job, and tries until they are written, because they are not computed again. Raises
        InvalidInput for an object that can never be written.
        """
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return await run_apart(self._storage.write, ObjectUri.parse(uri), content)
            except StorageError as error:
                if error.is_lasting:
                    raise _failed("output_uri", uri, error) from error
                log_warning("the object of a job cannot be written yet", problem=str(error))
            progress.is_stalled = True
            await asyncio.sleep(pause_s)
            pause_s = min(_LAST_PAUSE_S, 2 * pause_s)

    async def _get(self, get: Callable[[ObjectUri, int], ContentT], uri: str) -> ContentT:
        try:
            return await run_apart(get, ObjectUri.parse(uri), self._max_bytes)
        except StorageError as error:
            raise _failed("input_uri", uri, error) from error


def _failed(field: str, uri: str, error: StorageError) -> NeuronpipeError:
    return InvalidInput(field, f"{uri} {error}") if error.is_lasting else Unavailable(f"{field}: {uri} {error}")
