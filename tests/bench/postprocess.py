"""What the post-process stage costs for each task: CPU time of a request, from its message to its result's.

Run: python -m tests.bench.postprocess [ROW …]
"""

import asyncio
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from neuronpipe.api.forward.v1 import stages_pb2 as wire
from neuronpipe.api.v1.tasks_pb2 import (
    Aggregation,
    FeatureExtractionInput,
    FeatureType,
    FillMaskInput,
    ImageClassificationInput,
    QuestionAnsweringInput,
    RerankInput,
    SentenceEmbeddingInput,
    SentenceSimilarityInput,
    TaskInput,
    TextClassificationInput,
    TokenClassificationInput,
    ZeroShotClassificationInput,
)
from neuronpipe.bundles.repository import Bundle
from neuronpipe.core.calls import Call
from neuronpipe.core.items import ModelKey, PostprocessItem
from neuronpipe.core.model import ModelSpec, OutputSpec
from neuronpipe.core.packed import TensorSets, pack_input
from neuronpipe.core.tensors import Arrays
from neuronpipe.rpc.codecs import PostprocessCodec
from neuronpipe.stages.postprocessor.stage import PostprocessorStage, running_postprocessor

_SECONDS = 1.0
_RANDOM = np.random.default_rng(7)


@dataclass(frozen=True, slots=True)
class Case:
    """One request of a task as the stage gets it. `target_us`: the most CPU time that it should take in microseconds,
    or None.
    """

    describes: str
    target_us: float | None
    input: TaskInput
    outputs: list[Arrays]
    annotations: tuple[Arrays, ...] = ()
    facts: tuple[tuple[str, Any], ...] = ()

    def spec(self) -> ModelSpec:
        """A model of such outputs."""
        return ModelSpec(
            name="model",
            version=1,
            task=str(self.input.WhichOneof("task")),
            architecture="Model",
            inputs=("input_ids", "attention_mask"),
            outputs=tuple(OutputSpec(name=name, axes=array.shape) for name, array in self.outputs[0].items()),
            max_tokens=512,
            vocabulary_size=30522,
            pad_token_id=0,
            **dict(self.facts),
        )


def _logits(*shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return _RANDOM.standard_normal(shape).astype(np.float32) * 4


def _classification() -> Case:
    labels = tuple(f"label-{number}" for number in range(28))
    input = TaskInput(text_classification=TextClassificationInput(text="A text", top_k=5))
    return Case("28 labels, the best 5", 100, input, [{"logits": _logits(28)}], facts=(("labels", labels),))


def _embedding() -> Case:
    input = TaskInput(sentence_embedding=SentenceEmbeddingInput(text="A text"))
    return Case(
        "384 dimensions", 100, input, [{"sentence_embedding": _logits(384)}], facts=(("embedding_dimensions", 384),)
    )


def _question_answering() -> Case:
    tokens, question_tokens = 384, 12
    start = np.full(tokens, -1, np.int32)
    start[question_tokens:-1] = np.arange(tokens - question_tokens - 1) * 5
    start[0] = 0
    end = np.where(start > 0, start + 4, start)
    input = TaskInput(
        question_answering=QuestionAnsweringInput(question="Where is it?", context="word " * tokens, top_k=5)
    )
    outputs: list[Arrays] = [{"start_logits": _logits(tokens), "end_logits": _logits(tokens)}]
    return Case("384 tokens, the best 5", 500, input, outputs, ({"char_start": start, "char_end": end},))


def _token_classification(aggregation: "Aggregation.ValueType") -> Case:
    tokens, labels = 128, ("O", "B-PER", "I-PER", "B-LOC", "I-LOC", "B-ORG", "I-ORG", "B-MISC", "I-MISC")
    start = np.arange(-1, tokens - 1, dtype=np.int32) * 4
    start[[0, -1]] = -1
    continues = (_RANDOM.random(tokens) < 0.3).astype(np.int32)
    annotation = {"char_start": start, "char_end": np.where(start < 0, start, start + 3), "continues_word": continues}
    input = TaskInput(token_classification=TokenClassificationInput(text="wor " * tokens, aggregation=aggregation))
    logits = _logits(tokens, len(labels))
    logits[:, 0] += 6  # most words are nothing
    describes = f"128 tokens, {Aggregation.Name(aggregation).removeprefix('AGGREGATION_').lower()}"
    return Case(describes, 500, input, [{"logits": logits}], (annotation,), facts=(("labels", labels),))


def _fill_mask(vocabulary: int) -> Case:
    input = TaskInput(fill_mask=FillMaskInput(text="A [MASK]."))
    annotation: Arrays = {"place": np.array([2, 8], np.int32), "target_ids": np.array([], np.int32)}
    facts = (("tokens", tuple(f"token-{number}" for number in range(vocabulary))),)
    return Case(
        f"one mask, the best 5 of {vocabulary:,}", None, input, [{"logits": _logits(vocabulary)}], (annotation,), facts
    )


def _features() -> Case:
    input = TaskInput(feature_extraction=FeatureExtractionInput(text="A text", type=FeatureType.FEATURE_TYPE_INT8))
    state: list[Arrays] = [{"last_hidden_state": _logits(128, 384)}]
    return Case("128 tokens of 384 dimensions, in int8", 500, input, state, facts=(("embedding_dimensions", 384),))


def _similarity() -> Case:
    input = TaskInput(sentence_similarity=SentenceSimilarityInput(source="A text", texts=["a text"] * 16))
    vectors: list[Arrays] = [{"sentence_embedding": _logits(384)} for _ in range(17)]
    return Case("16 texts, 384 dimensions", 500, input, vectors, facts=(("embedding_dimensions", 384),))


def _ranking() -> Case:
    input = TaskInput(rerank=RerankInput(query="A text", texts=["a text"] * 16))
    return Case("16 texts", 500, input, [{"logits": _logits(1)} for _ in range(16)])


def _zero_shot() -> Case:
    input = TaskInput(
        zero_shot_classification=ZeroShotClassificationInput(text="A text", candidate_labels=["a label"] * 5)
    )
    return Case("5 labels", 100, input, [{"logits": _logits(3)} for _ in range(5)], facts=(("entailment_id", 2),))


def _image_classification() -> Case:
    labels = tuple(f"label-{number}" for number in range(1000))
    input = TaskInput(image_classification=ImageClassificationInput())
    return Case("1,000 labels, the best 5", 100, input, [{"logits": _logits(1000)}], facts=(("labels", labels),))


CASES: dict[str, Callable[[], Case]] = {
    "text_classification": _classification,
    "sentence_embedding": _embedding,
    "question_answering": _question_answering,
    "token_classification-none": partial(_token_classification, Aggregation.AGGREGATION_NONE),
    "token_classification-simple": partial(_token_classification, Aggregation.AGGREGATION_SIMPLE),
    "token_classification-max": partial(_token_classification, Aggregation.AGGREGATION_MAX),
    "fill_mask-30k": partial(_fill_mask, 30_522),
    "fill_mask-250k": partial(_fill_mask, 250_002),
    "feature_extraction": _features,
    "sentence_similarity": _similarity,
    "rerank": _ranking,
    "zero_shot_classification": _zero_shot,
    "image_classification": _image_classification,
}


async def measure(case: Case) -> float:
    """CPU time of a request in microseconds: the mean over a second."""
    spec = case.spec()
    bundle = cast("Bundle", SimpleNamespace(key=(spec.name, spec.version), spec=spec, decoding_spec=lambda: spec))
    annotations, outputs = TensorSets(arrays=case.annotations), TensorSets(arrays=case.outputs)
    codec, sent = PostprocessCodec(), wire.PostprocessItem()
    codec.write_item(PostprocessItem(Call(), ModelKey(*bundle.key), pack_input(case.input), annotations, outputs), sent)
    message = sent.SerializeToString()

    async def answer(stage: PostprocessorStage) -> bytes:
        return (await stage.postprocess(codec.read_item(wire.PostprocessItem.FromString(message)))).data

    async with running_postprocessor([bundle]) as stage:
        for _ in range(20):
            await answer(stage)
        count, began_s, began_cpu_s = 0, time.monotonic(), time.process_time()
        while time.monotonic() - began_s < _SECONDS:
            await answer(stage)
            count += 1
        return (time.process_time() - began_cpu_s) * 1e6 / count


def main(names: list[str]) -> None:
    """Prints the table."""
    print(f"{'TASK':28} {'CPU µs':>8} {'TARGET µs':>10}  REQUEST")
    for name in names or CASES:
        case = CASES[name]()
        target = "–" if case.target_us is None else f"{case.target_us:.0f}"
        print(f"{name:28} {asyncio.run(measure(case)):8.0f} {target:>10}  {case.describes}")


if __name__ == "__main__":
    main(sys.argv[1:])
