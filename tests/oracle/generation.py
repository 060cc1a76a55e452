"""What the suites of generated texts share: their cases, and what is compared of a text."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, TypeAlias

import transformers

from neuronpipe.api.v1.inference_pb2 import GenerateResponse
from neuronpipe.api.v1.tasks_pb2 import FinishReason, GeneratedText

# A text, and the options of its generation.
Case: TypeAlias = tuple[str, dict[str, Any]]

REFERENCE = f"generate, transformers {transformers.__version__}"


def options_of(case: Case) -> Mapping[str, Any]:
    """Returns the options by which cases are drawn: a case of each set of them is in the sample."""
    return {name: "set" for name in case[1] if name != "max_new_tokens"}


def said(text: GeneratedText) -> dict[str, Any]:
    """Returns what the reference also says of a text."""
    found = {"text": text.text, "token_ids": list(text.token_ids), "end": FinishReason.Name(text.finish_reason)}
    return found | ({"score": text.score} if text.HasField("score") else {})


def ended(token_ids: list[int], ends: Sequence[int]) -> list[int]:
    """Returns the tokens of a text up to its end. The others are padding."""
    return token_ids[: next((place for place, token_id in enumerate(token_ids, 1) if token_id in ends), len(token_ids))]


async def read_a_chunk_and_leave(events: AsyncGenerator[GenerateResponse, None]) -> None:
    """Reads a text as a caller does who has enough of it."""
    async for event in events:
        if event.HasField("chunk"):
            break
    await events.aclose()
