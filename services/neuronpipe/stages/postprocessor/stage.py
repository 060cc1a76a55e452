"""The post-process stage: lets the task decode the model's outputs, with the text of tokens by a tokenizer.json."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass

from neuronpipe.api.v1.tasks_pb2 import TaskResult
from neuronpipe.bundles.repository import Bundle
from neuronpipe.bundles.served import ServedModels, running_models
from neuronpipe.core.errors import SetupError
from neuronpipe.core.items import PostprocessItem
from neuronpipe.core.lanes import Lane, Lanes, is_on_event_loop
from neuronpipe.core.model import ModelSpec
from neuronpipe.core.packed import Packed, pack_result
from neuronpipe.tasks import ANSWERED_TASKS, TASKS
from neuronpipe.tasks.decoding_checks import check_decodable
from neuronpipe.tasks.generated_text import Detokenizer

# As the decoder ByteFallback finds them (tokenizers 0.23, decoders/byte_fallback.rs).
_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")
# The characters of byte-level tokens (GPT-2's bytes_to_unicode): bytes that are no visible character have others.
_VISIBLE = (*range(33, 127), *range(161, 173), *range(174, 256))
_HIDDEN = [byte for byte in range(256) if byte not in _VISIBLE]
_BYTE_OF = {chr(byte): byte for byte in _VISIBLE} | {chr(256 + place): byte for place, byte in enumerate(_HIDDEN)}


def load_detokenizer(written: bytes) -> Detokenizer:
    """The text of tokens. Safe to call from several threads.

    `written`: the file's content. Raises SetupError where the library is not installed: only models that generate
    need it.
    """
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        raise SetupError(
            "the text of generated tokens needs the package tokenizers: pip install 'neuronpipe[postprocessor]'"
        ) from error
    tokenizer = Tokenizer.from_buffer(written)
    # Of a Unigram model, special tokens are pieces that no text contains (compiler/tokenizers.py).
    hidden = {number for piece, number in tokenizer.get_vocab().items() if piece.startswith("\0")}
    special = hidden | {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    decoder = json.dumps(json.loads(written)["decoder"])
    pieces = tokenizer.get_vocab().items() if "ByteFallback" in decoder else ()
    added = tokenizer.get_added_tokens_decoder()

    def own_bytes(token_id: int) -> bytes | None:
        piece = str(tokenizer.id_to_token(token_id))
        if token_id in added:
            return str(added[token_id].content).encode()
        if "ByteLevel" in decoder:
            return bytes(_BYTE_OF[character] for character in piece if character in _BYTE_OF)
        return bytes([int(piece[1:-1], 16)]) if "ByteFallback" in decoder and _BYTE.fullmatch(piece) else None

    return Detokenizer(
        lambda token_ids: str(tokenizer.decode([one for one in token_ids if one not in hidden])),
        lambda token_id: token_id in special or tokenizer.id_to_token(token_id) is None,
        frozenset(number for piece, number in pieces if _BYTE.fullmatch(piece)) - special,
        own_bytes,
    )


@dataclass(frozen=True, slots=True)
class DecodingModel:
    """One model of the stage, and the lane in which its outputs are decoded.

    `detokenizer`: of a model that generates.
    """

    spec: ModelSpec
    lane: Lane
    detokenizer: Detokenizer | None = None

    def decode(self, item: PostprocessItem) -> Packed[TaskResult]:
        """Decodes the outputs of one input, on its lane."""
        item.call.check_deadline()
        task = ANSWERED_TASKS[item.input.task or self.spec.task]
        self.spec.check_answers(task.name)
        annotations, outputs = item.annotations.arrays, item.outputs.arrays
        if task.name in TASKS:
            check_decodable(task, self.spec, annotations, outputs)
        further = (self.detokenizer,) if task.generates else ()
        decoded = task.decode(getattr(item.input.message, task.name), self.spec, annotations, outputs, *further)
        result = pack_result(TaskResult(**{task.name: decoded}))
        if not is_on_event_loop():
            # A large result is serialized here, in the lane's thread, and not on the event loop.
            _ = result.data
        return result


class PostprocessorStage:
    """Decodes outputs. The instance's `postprocess` is the stage function."""

    def __init__(self, models: ServedModels[DecodingModel]) -> None:
        self.models = models

    async def postprocess(self, item: PostprocessItem) -> Packed[TaskResult]:
        """Decodes the outputs of one input."""
        with self.models.table.find(item.model.name, str(item.model.version)) as model:
            return await model.lane.run(item.size_bytes, model.decode, item)


@asynccontextmanager
async def running_postprocessor(bundles: list[Bundle]) -> AsyncIterator[PostprocessorStage]:
    """The stage, with everything loaded that decoding needs.

    Raises SetupError for a file that is missing or was changed.
    """
    async with AsyncExitStack() as stack:
        lanes = stack.enter_context(closing(Lanes("postprocess")))

        @asynccontextmanager
        async def open_model(bundle: Bundle) -> AsyncIterator[DecodingModel]:
            spec, lane = await asyncio.to_thread(bundle.decoding_spec), lanes.lane(bundle.spec.name)
            generates = TASKS[spec.task].generates
            detokenizer = await asyncio.to_thread(bundle.read_tokenizer, load_detokenizer) if generates else None
            try:
                yield DecodingModel(spec, lane, detokenizer)
            finally:
                await lane.close()

        yield PostprocessorStage(await stack.enter_async_context(running_models(ServedModels(open_model), bundles)))
