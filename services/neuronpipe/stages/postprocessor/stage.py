"""The post-process stage: lets the task decode the model's outputs, with the text of tokens by a tokenizer.json."""

import json
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, replace

from neuronpipe.api.v1.tasks_pb2 import TaskResult
from neuronpipe.bundles.repository import Bundle
from neuronpipe.bundles.served import ServedModels, running_models
from neuronpipe.core.errors import SetupError
from neuronpipe.core.items import PostprocessItem
from neuronpipe.core.model import ModelSpec
from neuronpipe.core.packed import Packed, pack_body
from neuronpipe.platform.process.background import run_apart
from neuronpipe.platform.process.lanes import Lane, Lanes, is_on_event_loop
from neuronpipe.tasks import ANSWERED_TASKS, TASKS
from neuronpipe.tasks.decoding_checks import check_decodable
from neuronpipe.tasks.generated_text import Detokenizer

# Byte tokens as the decoder ByteFallback finds them (tokenizers 0.23, decoders/byte_fallback.rs).
_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")
# The characters of byte-level tokens (GPT-2's bytes_to_unicode). Bytes without a visible character have substitutes.
_VISIBLE = (*range(33, 127), *range(161, 173), *range(174, 256))
_HIDDEN = [byte for byte in range(256) if byte not in _VISIBLE]
_BYTE_OF = {chr(byte): byte for byte in _VISIBLE} | {chr(256 + place): byte for place, byte in enumerate(_HIDDEN)}


def load_detokenizer(written: bytes) -> Detokenizer:
    """Makes the object that turns tokens into text. Several threads may call it.

    `written`: the file's content. Raises SetupError if the library is not installed, which only generating models
    need.
    """
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        raise SetupError(
            "the text of generated tokens needs the package tokenizers: pip install 'neuronpipe[postprocessor]'"
        ) from error
    tokenizer = Tokenizer.from_buffer(written)
    # In a Unigram model, special tokens are pieces that no text contains (compiler/tokenizers.py).
    hidden = {number for piece, number in tokenizer.get_vocab().items() if piece.startswith("\0")}
    special = hidden | {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    decoder = json.dumps(json.loads(written)["decoder"])
    pieces = tokenizer.get_vocab().items() if "ByteFallback" in decoder else ()
    added = tokenizer.get_added_tokens_decoder()

    def bytes_of(token_id: int) -> bytes | None:
        piece = str(tokenizer.id_to_token(token_id))
        if token_id in added:
            return str(added[token_id].content).removeprefix("\0").encode()
        if "ByteLevel" in decoder:
            return bytes(_BYTE_OF[character] for character in piece if character in _BYTE_OF)
        return bytes([int(piece[1:-1], 16)]) if "ByteFallback" in decoder and _BYTE.fullmatch(piece) else None

    byte_ids = frozenset(number for piece, number in pieces if _BYTE.fullmatch(piece)) - special
    marks = [str(tokenizer.id_to_token(number)) for number in hidden]

    def whole_text(token_ids: Sequence[int]) -> str:
        text = str(tokenizer.decode(list(token_ids), skip_special_tokens=False))
        for mark in marks if "\0" in text else ():
            text = text.replace(mark, mark[1:])
        return text

    return Detokenizer(
        lambda token_ids: str(tokenizer.decode([token_id for token_id in token_ids if token_id not in hidden])),
        lambda token_id: token_id in special or tokenizer.id_to_token(token_id) is None,
        byte_ids,
        bytes_of,
        Detokenizer(whole_text, lambda token_id: tokenizer.id_to_token(token_id) is None, byte_ids, bytes_of),
    )


@dataclass(frozen=True, slots=True)
class DecodingModel:
    """One model of the stage, and the lane in which its outputs are decoded.

    `detokenizer`: only for a generating model.
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
        decoders = (self.detokenizer,) if task.generates else ()
        decoded = task.decode(item.input.body, self.spec, annotations, outputs, *decoders)
        result = pack_body(TaskResult, task.name, decoded)
        if not is_on_event_loop():
            # The lane's thread serializes a large result here, so that the event loop need not.
            _ = result.data
        return result


class PostprocessorStage:
    """Decodes outputs. The instance's `postprocess` is the stage function."""

    def __init__(self, models: ServedModels[DecodingModel]) -> None:
        self.models = models

    async def postprocess(self, item: PostprocessItem) -> Packed[TaskResult]:
        with self.models.table.at(item.model) as model:
            return await model.lane.run(item.size_bytes, model.decode, item)


@asynccontextmanager
async def running_postprocessor(bundles: list[Bundle]) -> AsyncIterator[PostprocessorStage]:
    """Runs the stage with all objects loaded that decoding needs.

    Raises SetupError if a file is missing or was changed.
    """
    async with AsyncExitStack() as stack:
        lanes = stack.enter_context(closing(Lanes("postprocess")))

        @asynccontextmanager
        async def open_model(bundle: Bundle) -> AsyncIterator[DecodingModel]:
            spec, lane = await run_apart(bundle.decoding_spec), lanes.lane(bundle.spec.name)
            generates = TASKS[spec.task].generates
            detokenizer = await run_apart(bundle.read_tokenizer, load_detokenizer) if generates else None
            try:
                yield DecodingModel(spec, lane, detokenizer)
            finally:
                await lane.close()

        def adapt(model: DecodingModel, bundle: Bundle) -> DecodingModel:
            return replace(model, spec=bundle.spec)

        models = ServedModels(open_model, adapt=adapt)
        yield PostprocessorStage(await stack.enter_async_context(running_models(models, bundles)))
