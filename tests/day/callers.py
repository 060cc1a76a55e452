"""The callers of the day, through HAProxy: every door, texts of all lengths, and those who leave or do not read."""

import asyncio
import contextlib
import json
import pydoc_data.topics
import random
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from neuronpipe.api.v1.inference_pb2 import InferRequest
from neuronpipe.api.v1.tasks_pb2 import SentenceEmbeddingInput, TaskInput, Truncation
from neuronpipe.client import AsyncClient
from neuronpipe.core.errors import NeuronpipeError
from tests.day.models import ENCODER, GENERATOR, RERANKER
from tests.day.system import System

# More than the slowest start of an executor on a busy machine.
_DEADLINE_S = 100.0
_TEXTS = 400
# Cosine of the vectors of one text in int8, whose last bits depend on the shape of its batch.
_SAME = 0.98
_JOB_INPUTS = 12
# REFUSED_STREAM: no server has begun the call, and HTTP/2 lets the caller repeat it. gRPC does so once.
_REFUSED = "RST_STREAM with error code 7"


@dataclass(frozen=True, slots=True)
class Call:
    """A call, by time.monotonic(). `problem`: empty for a right answer."""

    door: str
    began_s: float
    ended_s: float
    problem: str = ""


@dataclass
class Jobs:
    """The names of jobs that were submitted, and what was wrong with their results."""

    names: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


class Callers:
    """Calls until they are stopped, except in quiet times."""

    def __init__(self, system: System, seed: int) -> None:
        self._system = system
        self._chance = random.Random(seed)
        self.calls: list[Call] = []
        self.jobs = Jobs()
        self.left = 0
        self._may_call = asyncio.Event()
        self._may_call.set()
        self._is_over = False
        self._vectors: dict[str, np.ndarray[Any, Any]] = {}
        self._answers: dict[str, Any] = {}
        self._running = 0
        words = " ".join(pydoc_data.topics.topics.values()).split()
        starts = [self._chance.randrange(len(words) - 400) for _ in range(_TEXTS)]
        lengths = [self._chance.choice((2, 5, 10, 10, 20, 20, 40, 40, 80, 160, 350)) for _ in range(_TEXTS)]
        self._texts = [" ".join(words[start : start + length]) for start, length in zip(starts, lengths, strict=True)]

    async def run(self) -> None:
        """Calls from all doors until `end`."""
        keys = self._system.keys
        async with (
            AsyncClient(self._system.grpc, api_key=keys["shop"], timeout_s=_DEADLINE_S, retries=False) as shop,
            AsyncClient(self._system.grpc, api_key=keys["greedy"], timeout_s=_DEADLINE_S, retries=False) as greedy,
            AsyncClient(self._system.grpc, api_key=keys["search"], timeout_s=_DEADLINE_S, retries=False) as search,
            httpx.AsyncClient(
                base_url=f"http://{self._system.http}",
                timeout=_DEADLINE_S,
                headers={"authorization": f"Bearer {keys['search']}"},
                limits=httpx.Limits(max_connections=None, keepalive_expiry=3),
            ) as http,
            asyncio.TaskGroup() as group,
        ):
            loops: list[tuple[str, float, Callable[[], Awaitable[None]]]] = [
                *[("gRPC Infer", 0.2, lambda: self._embed(shop))] * 4,
                ("gRPC InferBatch", 1.0, lambda: self._batch(shop)),
                ("gRPC InferStream", 1.0, lambda: self._stream(shop)),
                ("gRPC Generate", 0.2, lambda: self._generate(shop)),
                *[("OpenAI embeddings", 0.3, lambda: self._openai_embed(http))] * 2,
                *[("OpenAI chat", 0.3, lambda: self._chat(http))] * 2,
                ("TEI rerank", 1.0, lambda: self._rerank(http)),
                ("TEI embed", 0.2, lambda: self._tei(http)),
                ("OIP infer", 0.3, lambda: self._oip(http)),
                ("jobs", 1.0, lambda: self._job(search)),
            ]
            for door, pause_s, call in loops:
                group.create_task(self._repeat(pause_s, self._counted(door, call)))
            group.create_task(self._repeat(1.0, lambda: self._leave(shop)))
            group.create_task(self._repeat(0.5, lambda: self._leave_stream(http)))
            group.create_task(self._repeat(0.5, lambda: self._exceed(greedy)))
            group.create_task(self._repeat(20.0, self._ignore))

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Nobody calls in the block; calls that run may still end."""
        self._may_call.clear()
        try:
            yield
        finally:
            self._may_call.set()

    def end(self) -> None:
        """Has `run` return once all that runs has ended."""
        self._is_over = True
        self._may_call.set()

    async def _repeat(self, pause_s: float, call: Callable[[], Awaitable[None]]) -> None:
        while not self._is_over:
            await self._may_call.wait()
            await call()
            await asyncio.sleep(self._chance.uniform(0, 2 * pause_s))

    def _counted(self, door: str, call: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
        async def counted() -> None:
            began_s, problem = time.monotonic(), ""
            try:
                try:
                    await call()
                except NeuronpipeError as error:
                    if _REFUSED not in str(error):
                        raise
                    await call()
            except (NeuronpipeError, httpx.HTTPError, ValueError) as error:
                problem = f"{type(error).__name__}: {error}"
            self.calls.append(Call(door, began_s, time.monotonic(), problem))

        return counted

    def _text(self) -> str:
        """A text that others ask for, too, or one that nobody has asked for before."""
        text = self._chance.choice(self._texts)
        return text if self._chance.random() < 0.5 else f"{text} {self._chance.random():.9f}"

    def _check_vector(self, text: str, vector: Any) -> None:
        found = np.asarray(vector, dtype=np.float64)
        known = self._vectors.setdefault(text, found) if text in self._vectors or text in self._texts else found
        cosine = float(found @ known / (np.linalg.norm(found) * np.linalg.norm(known)))
        if found.shape != (384,) or not cosine > _SAME:
            raise ValueError(f"another vector than before, with the cosine {cosine:.4f}")

    def _check_same(self, key: str, answer: Any) -> None:
        known = self._answers.setdefault(key, answer)
        same = known == answer if isinstance(answer, str) else np.allclose(known, answer, atol=1e-3)
        if not same:
            raise ValueError(f"another answer than before: {answer!r}, not {known!r}")

    # --- doors ---

    def _input(self, text: str) -> InferRequest:
        input = SentenceEmbeddingInput(text=text, truncation=Truncation.TRUNCATION_RIGHT)
        return InferRequest(model=ENCODER, input=TaskInput(sentence_embedding=input))

    async def _embed(self, client: AsyncClient) -> None:
        text = self._text()
        response = await client.infer(self._input(text))
        self._check_vector(text, response.result.sentence_embedding.embedding)

    async def _batch(self, client: AsyncClient) -> None:
        texts = [self._text() for _ in range(4)]
        for text, outcome in zip(texts, await client.infer_batch(map(self._input, texts)), strict=True):
            if outcome.HasField("error"):
                raise ValueError(outcome.error.message)
            self._check_vector(text, outcome.response.result.sentence_embedding.embedding)

    async def _stream(self, client: AsyncClient) -> None:
        texts = [self._text() for _ in range(4)]
        requests = [self._input(text) for text in texts]
        for number, request in enumerate(requests):
            request.request_id = str(number)
        answered = 0
        async for message in client.infer_stream(requests):
            if message.outcome.HasField("error"):
                raise ValueError(message.outcome.error.message)
            result = message.outcome.response.result
            self._check_vector(texts[int(message.request_id)], result.sentence_embedding.embedding)
            answered += 1
        if answered != len(texts):
            raise ValueError(f"{answered} answers to {len(texts)} requests")

    async def _generate(self, client: AsyncClient) -> None:
        prompt, text = " ".join(self._chance.choice(self._texts).split()[:20]), ""
        async for message in client.generate(GENERATOR, prompt, max_new_tokens=24, timeout_s=_DEADLINE_S):
            text += message.chunk.text
        self._check_same(f"generate {prompt}", text)

    async def _post(self, http: httpx.AsyncClient, path: str, body: Any) -> Any:
        response = await http.post(path, json=body)
        if response.status_code != httpx.codes.OK:
            raise ValueError(f"{response.status_code} {response.text[:200]}")
        return response.json()

    async def _openai_embed(self, http: httpx.AsyncClient) -> None:
        texts = [self._text() for _ in range(self._chance.choice((1, 1, 4)))]
        body = {"model": ENCODER, "input": texts, "truncate": True}
        found = await self._post(http, "/v1/embeddings", body)
        for text, entry in zip(texts, found["data"], strict=True):
            self._check_vector(text, entry["embedding"])

    async def _chat(self, http: httpx.AsyncClient) -> None:
        content = " ".join(self._chance.choice(self._texts).split()[:20])
        body = {
            "model": GENERATOR,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 24,
            "temperature": 0,
            "stream": True,
        }
        text, is_whole = "", False
        async with http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != httpx.codes.OK:
                raise ValueError(f"{response.status_code} {(await response.aread())[:200]!r}")
            async for line in response.aiter_lines():
                data = line.removeprefix("data: ")
                is_whole |= data == "[DONE]"
                if data.startswith("{"):
                    event = json.loads(data)
                    if "error" in event:
                        raise ValueError(str(event["error"]))
                    text += (event["choices"][0]["delta"].get("content") or "") if event["choices"] else ""
        if not is_whole:
            raise ValueError("the stream ended before [DONE]")
        self._check_same(f"chat {content}", text)

    async def _rerank(self, http: httpx.AsyncClient) -> None:
        chosen = self._chance.choice(range(0, _TEXTS, 8))
        body = {
            "model": RERANKER,
            "query": self._texts[chosen],
            "texts": self._texts[chosen + 1 : chosen + 4],
            "truncate": True,
        }
        found = await self._post(http, "/rerank", body)
        scores = [rank["score"] for rank in sorted(found, key=lambda rank: rank["index"])]
        self._check_same(f"rerank {chosen}", scores)

    async def _tei(self, http: httpx.AsyncClient) -> None:
        text = self._text()
        (vector,) = await self._post(http, "/embed", {"model": ENCODER, "inputs": text, "truncate": True})
        self._check_vector(text, vector)

    async def _oip(self, http: httpx.AsyncClient) -> None:
        text = self._text()
        tensor = {"name": "text", "shape": [1], "datatype": "BYTES", "data": [text]}
        body = {"inputs": [tensor], "parameters": {"truncation": "right"}}
        found = await self._post(http, f"/v2/models/{ENCODER}/infer", body)
        (output,) = (tensor for tensor in found["outputs"] if tensor["name"] == "embedding")
        self._check_vector(text, output["data"])

    # --- jobs ---

    async def _job(self, client: AsyncClient) -> None:
        """Submits a job. Its id makes the call safe to repeat, as callers do while Redis does not answer."""
        texts = [self._text() for _ in range(self._chance.randrange(1, _JOB_INPUTS))]
        request_id, ends_s = f"{self._chance.getrandbits(64):x}", time.monotonic() + _DEADLINE_S
        while True:
            try:
                job = await client.submit(map(self._input, texts), request_id=request_id)
                break
            except NeuronpipeError:
                if time.monotonic() > ends_s:
                    raise
                await asyncio.sleep(0.5)
        self.jobs.names.append(job.name)

    async def await_jobs(self, limit_s: float) -> None:
        """Waits until all jobs have ended, for so long for each, and looks at their results."""
        names = iter(self.jobs.names)

        async def wait(client: AsyncClient) -> None:
            for name in names:
                try:
                    outcomes = await client.job(name).wait(limit_s)
                except NeuronpipeError as error:
                    self.jobs.wrong.append(f"a job: {type(error).__name__}: {error}")
                    continue
                if not outcomes or any(outcome.HasField("error") for outcome in outcomes):
                    self.jobs.wrong.append(
                        f"a job: inputs failed: {[outcome.error.message for outcome in outcomes][:1]}"
                    )

        async with AsyncClient(self._system.grpc, api_key=self._system.keys["search"]) as client:
            await asyncio.gather(*(wait(client) for _ in range(16)))

    # --- rude callers ---

    async def _leave(self, client: AsyncClient) -> None:
        """Leaves before the answer is there."""
        self.left += 1
        with contextlib.suppress(TimeoutError, NeuronpipeError):
            async with asyncio.timeout(self._chance.uniform(0.001, 0.1)):
                await client.infer_batch([self._input(self._text()) for _ in range(4)])

    async def _leave_stream(self, http: httpx.AsyncClient) -> None:
        """Leaves in the middle of a text."""
        self.left += 1
        body = {"model": GENERATOR, "prompt": self._text()[:200], "max_tokens": 400, "stream": True}
        with contextlib.suppress(httpx.HTTPError):
            async with http.stream("POST", "/v1/completions", json=body) as response:
                async for _ in response.aiter_lines():
                    if self._chance.random() < 0.2:
                        break

    async def _exceed(self, client: AsyncClient) -> None:
        """Asks for more than its quota, and has only itself to blame."""
        with contextlib.suppress(NeuronpipeError):
            await client.infer(self._input(self._text()))

    async def _ignore(self) -> None:
        """Reads nothing of a large answer, right behind the proxy, until the server ends the connection."""
        self.left += 1
        body = json.dumps({"model": ENCODER, "input": ["word"] * 512}).encode()
        key = self._system.keys["search"]
        head = f"POST /v1/embeddings HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        gateway = self._system.members["gateway-a"]
        with contextlib.suppress(OSError), socket.socket() as rude:
            rude.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            rude.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(rude, ("127.0.0.1", gateway.http_port))
            await loop.sock_sendall(rude, head.encode() + body)
            await asyncio.sleep(10)
