"""Objects of jobs: writes outcomes, and names what cannot be used."""

import asyncio
from typing import BinaryIO

from neuronpipe.bulk.jobs.job import JobProgress
from neuronpipe.core.errors import InvalidInput, NeuronpipeError, Unavailable
from neuronpipe.core.logs import log_warning
from neuronpipe.platform.process.background import run_apart
from neuronpipe.platform.storage import ObjectUri, Storage, StorageError

# Pauses between writes, doubled each time.
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.1, 30.0


def object_failed(field: str, uri: str, error: StorageError) -> NeuronpipeError:
    """Returns the error of a job whose object cannot be used. After an Unavailable, another attempt may succeed."""
    return InvalidInput(field, f"{uri} {error}") if error.is_lasting else Unavailable(f"{field}: {uri} {error}")


async def write_object(storage: Storage, uri: str, content: bytes | BinaryIO, progress: JobProgress) -> None:
    """Writes the outcomes of a job, and tries until they are written, because they are not computed again. Raises
    InvalidInput for an object that can never be written.
    """
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            return await run_apart(storage.write, ObjectUri.parse(uri), content)
        except StorageError as error:
            if error.is_lasting:
                raise object_failed("output_uri", uri, error) from error
            log_warning("the object of a job cannot be written yet", problem=str(error))
        progress.is_stalled = True
        await asyncio.sleep(pause_s)
        pause_s = min(_LAST_PAUSE_S, 2 * pause_s)
