"""The settings of the stages."""

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, field_validator

from neuronpipe.core.errors import SetupError
from neuronpipe.core.settings import Settings
from neuronpipe.core.units import words_of
from neuronpipe.platform.cache.settings import CachePolicy, RedisSettings
from neuronpipe.platform.process.settings import StageSettings

MAX_CORES = 256
_CORES = re.compile(r"\d{1,3}(-\d{1,3})?(,\d{1,3}(-\d{1,3})?)*")


def parse_cores(text: str) -> tuple[int, ...]:
    """Reads a list of cores such as "0-3" or "0,2-3", and returns the cores ascending. Raises SetupError."""
    if not _CORES.fullmatch(text):
        raise SetupError(f"cores {text!r}: must be a number of cores, or a list such as 0-3 or 0,2")
    cores: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if int(last or first) < int(first) or int(last or first) >= MAX_CORES:
            raise SetupError(f"cores {text!r}: {part} is not a range of cores from 0 to {MAX_CORES - 1}")
        cores.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(cores))


class CoreSettings(Settings):
    """The cores on which models run."""

    cores: int | str = Field(
        0,
        description="cores that all models share: a number, or NeuronCores such as 0-3; 0: all, with openvino one for "
        "each CPU thread",
    )

    @field_validator("cores", mode="before")
    @classmethod
    def _check_cores(cls, cores: object) -> object:
        if isinstance(cores, str) and not cores.isdigit():
            try:
                parse_cores(cores)
            except SetupError as error:
                raise ValueError(str(error)) from error
            return cores
        if not 0 <= int(str(cores)) <= MAX_CORES:
            raise ValueError(f"at most {MAX_CORES}")
        return int(str(cores))

    @property
    def core_count(self) -> int:
        """The number of cores; 0 for all."""
        return len(parse_cores(self.cores)) if isinstance(self.cores, str) else self.cores


class EngineSettings(CoreSettings):
    """Settings of the executor."""

    backend: str = Field("", description="back end to run on; default: the first that the bundle was compiled for")
    in_flight: int = Field(
        1, ge=1, le=4, description="batches in flight on a core: 1 for the lowest latency, 2 keeps a NeuronCore busy"
    )
    threads: int = Field(0, ge=0, le=1024, description="CPU threads shared by the cores; 0: one for each available CPU")
    max_batch_size: int = Field(
        32, ge=1, le=4096, description="maximum number of sequences in a batch; not for buckets"
    )
    max_batch_tokens: int = Field(
        8192, ge=1, description="maximum number of padded tokens in a batch of several sequences; not for buckets"
    )
    lone_graph_bytes: int = Field(
        128 << 20,
        ge=0,
        description="memory for lone graphs of all models, in bytes: OpenVINO's graphs of one length, which compute "
        "texts that come one at a time in two thirds of the time; 0: no lone graphs",
    )
    kv_cache_bytes: int = Field(
        1 << 30, ge=1 << 16, description="memory for the key-value cache of a model that generates, in bytes"
    )
    max_model_memory_bytes: int = Field(
        0,
        ge=0,
        description="memory for all models, in bytes: the files that the back end reads, and kv_cache_bytes of each "
        "model that generates, on the device if the back end uses a device; 0: no limit",
    )
    models_on_demand: bool = Field(
        False,
        description="load a model at its first request, and unload the least recently used models if "
        "max_model_memory_bytes is reached",
    )
    max_prompt_wait_s: float = Field(
        0.0,
        ge=0,
        le=600,
        description="seconds that a prompt may wait for its first step, by forecast; prompts that would wait longer "
        "are refused; 0: no limit",
    )
    prompt_lookup_tokens: int = Field(
        0,
        ge=0,
        le=16,
        description="largest number of draft tokens of a text in a step, which follow its last tokens at an earlier "
        "place in the prompt or the text; texts stay the same, and texts that repeat their prompt come faster; needs "
        "OpenVINO's paged attention; 0: no drafts",
    )
    impaired_limit_s: float = Field(
        600.0,
        ge=0,
        le=86400,
        description="seconds of lost cores, or of loading or unloading a model, after which health reports that the "
        "process should be replaced, and the load ends; 0: never",
    )

    # Sequences in the queue of a model. Further sequences are refused.
    max_queue_sequences: ClassVar[int] = 4096
    # Tokens that a generating model computes in one step. A longer prompt takes several steps, and more of them while
    # other texts wait for their next token.
    step_tokens: ClassVar[int] = 256
    # Seconds after which a batch counts as hung, or ten times its forecast if that is longer. Its core is given up. The
    # same limit holds for a step of a generating model.
    batch_limit_s: ClassVar[float] = 60.0


class NeuronExecutorSettings(StageSettings):
    """Settings of the neuron-executor."""

    prefix: ClassVar[str] = "NEURONPIPE_NEURON_EXECUTOR_"
    defaults: ClassVar[Mapping[str, Any]] = {"listen": "127.0.0.1:50052"}

    executor: EngineSettings


class EncodingSettings(Settings):
    """The encoding of inputs, and the caches of tokens and pixels."""

    special_tokens_in_texts: str = Field(
        "",
        description="models that read special tokens in callers' texts, as [SEP] or <|im_start|>, separated by commas; "
        "*: all; others, and all chat messages, have them as plain text",
    )
    token_cache_bytes: int = Field(
        64 << 20,
        ge=0,
        description="memory for token ids of texts in this process, and as much again for pixels of images, in bytes; "
        "0: no cache",
    )
    token_cache_redis: CachePolicy = Field(
        "auto", description="use of encodings in Redis: auto (texts of 2 KiB or more, and images), always, never"
    )

    def reads_special_tokens(self, model: str) -> bool:
        """Returns whether special tokens that a caller's text spells are special for a model."""
        return not {model, "*"}.isdisjoint(words_of(self.special_tokens_in_texts))


class TokenizerSettings(StageSettings):
    """Settings of the tokenizer."""

    prefix: ClassVar[str] = "NEURONPIPE_TOKENIZER_"
    defaults: ClassVar[Mapping[str, Any]] = {"listen": "127.0.0.1:50051"}

    tokenizer: EncodingSettings
    redis: RedisSettings


class PostprocessorSettings(StageSettings):
    """Settings of the postprocessor."""

    prefix: ClassVar[str] = "NEURONPIPE_POSTPROCESSOR_"
    defaults: ClassVar[Mapping[str, Any]] = {"listen": "127.0.0.1:50053"}
