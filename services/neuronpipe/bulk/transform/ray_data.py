"""Shards on a Ray cluster: the rows of a dataset, which actors map.

Each actor has its own pipeline, and itself writes a shard's file and its line in the manifest. Ray only distributes
shards and restarts actors: files written by Ray were out of order, and its checkpoints resume by written blocks.
"""

import asyncio
import os
import pickle
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.data

from neuronpipe.bulk.transform.near_engine import TransformSettings, find_bundle, running_near_engine
from neuronpipe.bulk.transform.run import RunShards
from neuronpipe.bulk.transform.shards import (
    NAMED_ERRORS,
    DoneShard,
    RowError,
    RowProgress,
    Shard,
    ShardWork,
    run_shards,
)
from neuronpipe.core.errors import NeuronpipeError, SetupError

LOCAL = "local"


@dataclass(frozen=True, slots=True)
class RayRequest:
    """The cluster, and the resources of each actor. `address`: LOCAL for a cluster on this machine, for this run."""

    address: str
    actors: int
    cpus: float
    gpus: float
    neuron_cores: float


@dataclass(frozen=True, slots=True)
class ActorWork:
    """The data of an actor: the model, which it finds at the same path, and its work on shards."""

    repository: Path
    trusted_keys: Path | None
    model: str
    version: str
    settings: TransformSettings
    work: ShardWork


class ShardActor:
    """Maps batches of a dataset: `shard`, pickled, to `done`, pickled. One actor for each process of Ray's."""

    def __init__(self, pickled: bytes) -> None:
        """`pickled`: an ActorWork. Raises SetupError if the model cannot run here."""
        actor_work: ActorWork = pickle.loads(pickled)  # noqa: S301 (of the process that started the run)
        self._work = actor_work.work
        self._stack = AsyncExitStack()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="pipeline", daemon=True).start()
        bundle = find_bundle(actor_work.repository, actor_work.model, actor_work.version, actor_work.trusted_keys)
        engine = self._stack.enter_async_context(running_near_engine(bundle, actor_work.settings))
        self._engine = asyncio.run_coroutine_threadsafe(engine, self._loop).result()

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        shards = [pickle.loads(shard) for shard in batch["shard"]]  # noqa: S301
        done = asyncio.run_coroutine_threadsafe(self._run(shards), self._loop).result()
        return {"done": [pickle.dumps(result) for result in done]}

    async def _run(self, shards: Sequence[Shard]) -> list[tuple[DoneShard, list[RowError]]]:
        errors: list[RowError] = []
        results = []

        def note(progress: RowProgress) -> None:
            errors.extend(progress.named_errors[: NAMED_ERRORS - len(errors)])

        async for shard in run_shards(shards, self._work, self._engine, note):
            results.append((shard, list(errors)))
            errors.clear()
        return results


def run_on_ray(request: RayRequest, make_work: Callable[[ShardWork], ActorWork]) -> RunShards:

    async def run(
        shards: Sequence[Shard], work: ShardWork, note: Callable[[RowProgress], None]
    ) -> AsyncIterator[DoneShard]:
        pickled = pickle.dumps(make_work(work))
        await asyncio.to_thread(_connect, request.address)
        try:
            rows = iter(_dataset(shards, pickled, request).iter_rows())
            while (row := await asyncio.to_thread(next, rows, None)) is not None:
                done, errors = pickle.loads(row["done"])  # noqa: S301
                note(RowProgress(done.rows, done.errors, errors))
                yield done
        except ray.exceptions.RayError as error:
            raise _own_error(error) from error
        finally:
            await asyncio.to_thread(ray.shutdown)

    return run


def _connect(address: str) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # otherwise Ray would report over the network
    try:
        ray.init(
            address=None if address == LOCAL else address,
            include_dashboard=False if address == LOCAL else None,
            log_to_driver=False,
            logging_level="ERROR",
        )
    except Exception as error:  # Ray raises plain exceptions here
        raise SetupError(f"--ray {address}: there is no cluster, or it does not start: {_last_line(error)}") from error
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False


def _dataset(shards: Sequence[Shard], work: bytes, request: RayRequest) -> Any:
    """Returns a dataset with a block for each shard, so that a lost actor costs the time of its shard only."""
    items = [{"shard": pickle.dumps(shard)} for shard in shards]
    return ray.data.from_items(items, override_num_blocks=len(items)).map_batches(
        ShardActor,
        fn_constructor_args=(work,),
        batch_size=1,
        batch_format="numpy",
        compute=ray.data.ActorPoolStrategy(size=min(request.actors, len(items))),
        num_cpus=request.cpus,
        num_gpus=request.gpus or None,
        resources={"neuron_cores": request.neuron_cores} if request.neuron_cores else None,
    )


def _own_error(error: BaseException) -> BaseException:
    """Returns the error of an actor as this process would have raised it, or Ray's own error."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, NeuronpipeError | SetupError):
            return cause
        cause = getattr(cause, "cause", None) or cause.__cause__
    return SetupError(f"--ray: {_last_line(error)}")


def _last_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[-1]
