"""Attacks of one tenant on the texts of others: forms that cost much to compile, and texts that take all rows."""

import asyncio
import contextlib
import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from neuronpipe.api.v1.inference_pb2 import InferRequest
from neuronpipe.api.v1.tasks_pb2 import GenerationOptions, TaskInput, TextGenerationInput
from tests.attack.frame import SYSTEMS, Attacked, attack
from tests.models.repository import link_models

_API = "/neuronpipe.api.v1.InferenceService"
_OPTIONS = [("grpc.use_local_subchannel_pool", 1)]
_LIMIT_S = 60.0
_NUMBERS = itertools.count()
_LONG = 150


@contextmanager
def _writing(repository: Path, folder: Path) -> Iterator[Attacked]:
    """The guarded system with a model that generates. The victim asks for short texts, some of them with a form."""
    from tests.models.decoders import make_writer  # takes seconds to import

    models = link_models(folder / "models", repository, "minilm", "classifier")
    make_writer(folder / "writer")
    (models / "writer").symlink_to(folder / "writer" / "repository" / "writer")
    with SYSTEMS["guarded"](models, folder) as server:
        yield replace(server, limit_s=5.0, asks_for="texts")


SYSTEMS["writing"] = _writing
_to_the_writer = partial(attack, system="writing", sends_mib=1)


def _request(**options: Any) -> bytes:
    given = TextGenerationInput(prompt=f"{next(_NUMBERS)}", options=GenerationOptions(**options))
    return InferRequest(model="writer", input=TaskInput(text_generation=given)).SerializeToString()


async def _ask(server: Attacked, *requests: bytes) -> None:
    """Sends requests side by side. They may be refused."""
    async with grpc.aio.insecure_channel(server.target, _OPTIONS) as channel:
        infer: Any = channel.unary_unary(f"{_API}/Infer")
        calls = [infer(request, metadata=server.metadata, timeout=_LIMIT_S) for request in requests]
        for call in calls:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await call


def _names(count: int) -> dict[str, Any]:
    """Properties with other names than those before."""
    first = next(_NUMBERS) * 3
    return {chr(0x4E00 + (first + number) % 20_000): {} for number in range(count)}


def _form(schema: Any) -> bytes:
    return _request(json_schema=json.dumps(schema, ensure_ascii=False), max_new_tokens=8)


@_to_the_writer("N1", "forms of thousands of properties, each another one", is_quick=True)
async def forms_of_many_properties(server: Attacked) -> None:
    await _ask(server, *(_form({"properties": _names(8800)}) for _ in range(4)))


def _of_many(names: dict[str, Any]) -> Any:
    """A form with these properties, of which as many as are allowed may come next in a text."""
    return {"properties": names, "required": [*names][300::301]}


# A form that is compiled takes up to 15 MB.
@_to_the_writer("N1", "forms of as many properties as are allowed, each another one", constant_mib=192)
async def forms_of_as_many_properties_as_are_allowed(server: Attacked) -> None:
    await _ask(server, *(_form(_of_many(_names(1990))) for _ in range(16)))


@_to_the_writer("N1", "forms and grammars whose cost is not in their size")
async def forms_that_multiply(server: Attacked) -> None:
    some, few = _names(500), _names(30)
    patterns: dict[str, Any] = {"patternProperties": {f"^{name}": {} for name in some}}
    joined = {"$defs": {"a": {"properties": some}}, "anyOf": [{"$ref": "#/$defs/a", "title": one} for one in some]}
    of_all = {"allOf": [{"type": "string", "pattern": one} for one in few]}
    grammar = "start: T\nT: " + " & ".join(f"/.*{one}.*/" for one in few)
    await _ask(server, *map(_form, (patterns, joined, of_all)), _request(grammar=grammar, max_new_tokens=8))


# Kept grammars take up to 90 MiB.
@_to_the_writer("N1", "regexes of a few characters that repeat a letter thousands of times", constant_mib=128)
async def regexes_that_repeat(server: Attacked) -> None:
    number = next(_NUMBERS)
    patterns = (f"a{{{9_000 + number}}}", f"(a{{300}}b){{300}}c{{{number}}}", f"(a|b{{{90_000 + number}}}){{1,9}}")
    schemas = (json.dumps({"type": "string", "pattern": f"^{pattern}$"}) for pattern in patterns)
    options = ({"regex": pattern} for pattern in patterns)
    await _ask(server, *(_request(max_new_tokens=8, **given) for given in options))
    await _ask(server, *(_request(max_new_tokens=8, json_schema=schema) for schema in schemas))
    await _ask(server, _request(max_new_tokens=8, grammar=f"start: /{patterns[0]}/"))


@_to_the_writer("N4", "four searches of 16 beams at a time", is_quick=True)
async def wide_searches(server: Attacked) -> None:
    await _ask(server, *(_request(num_beams=16, max_new_tokens=_LONG) for _ in range(4)))


@_to_the_writer("N4", "64 searches of 16 beams with 16 texts each")
async def many_wide_searches(server: Attacked) -> None:
    await _ask(server, *(_request(num_beams=16, num_return_sequences=16, max_new_tokens=_LONG) for _ in range(64)))


@_to_the_writer("N4", "600 streams of 16 texts each that stay unread")
async def streams_of_many_texts_that_nobody_reads(server: Attacked) -> None:
    async with grpc.aio.insecure_channel(server.target, _OPTIONS) as channel:
        generate: Any = channel.unary_stream(f"{_API}/Generate")
        for number in range(600):
            data = _request(num_return_sequences=16, do_sample=True, seed=number, max_new_tokens=_LONG)
            generate(data, metadata=server.metadata, timeout=_LIMIT_S)
            await asyncio.sleep(0.002)
        await asyncio.sleep(5)
