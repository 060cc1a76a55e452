"""Makes attributes of spans and metrics from the values that the stages return."""

from neuronpipe.api.v1.inference_pb2 import CacheOutcome
from neuronpipe.core.calls import BULK
from neuronpipe.core.items import EncodedInput, Prediction
from neuronpipe.core.names import Attributes
from neuronpipe.core.tracing import AttributeValue

_PREFIX = "CACHE_OUTCOME_"
_CACHE_WORDS = {number: name.removeprefix(_PREFIX).lower() for name, number in CacheOutcome.items()} | {0: "none"}


def attributes_of(value: object) -> dict[str, AttributeValue]:
    """Returns the attributes of a stage's span, from the value that the stage returned."""
    if isinstance(value, EncodedInput):
        return {
            Attributes.TOKENS: value.tokens,
            Attributes.TRUNCATED_TOKENS: value.truncated_tokens,
            Attributes.SEQUENCES: len(value.sequences),
            Attributes.TOKEN_CACHE: cache_word(value.token_cache),
        }
    if isinstance(value, Prediction):
        return {
            Attributes.BATCH_SIZE: value.batch_size,
            Attributes.BUCKET_TOKENS: value.bucket_tokens,
            Attributes.PADDED_TOKENS: value.padded_tokens,
        }
    return {}


def cache_word(outcome: int) -> str:
    """Returns the word for a cache's outcome, or the number of an outcome that only newer services know."""
    return _CACHE_WORDS.get(outcome, str(outcome))


def priority_word(priority: int) -> str:
    return "bulk" if priority == BULK else "interactive"
