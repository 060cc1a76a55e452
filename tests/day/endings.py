"""How often each job has ended, by the messages of both servers of Redis."""

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence

import redis.asyncio

from tests.day.system import System

_ENDED = "neuronpipe-jobs:ended"


class Endings:
    """Listens until it is cancelled. A server that was away has told nobody, and is listened to again."""

    def __init__(self, system: System) -> None:
        self._urls = [server.url for server in system.redis]
        # Of each server: a replica tells what its master tells.
        self._counts: dict[str, Counter[str]] = {url: Counter() for url in self._urls}

    async def run(self) -> None:
        """Listens to both servers."""
        await asyncio.gather(*map(self._listen, self._urls))

    async def _listen(self, url: str) -> None:
        while True:
            client = redis.asyncio.Redis.from_url(url)
            try:
                async with client.pubsub(ignore_subscribe_messages=True) as channel:
                    await channel.subscribe(_ENDED)
                    async for message in channel.listen():
                        self._counts[url][f"jobs/{message['data'].decode()}"] += 1
            except redis.RedisError:
                await asyncio.sleep(0.1)
            finally:
                await client.aclose()

    def problems(self, names: Sequence[str]) -> Iterator[str]:
        """Jobs that have ended more than once."""
        for name in names:
            if (count := max(counts[name] for counts in self._counts.values())) > 1:
                yield f"a job has ended {count} times"
