"""An answer for the sample input of each task, in the JSON of its message and in Hugging Face's.

The numbers are examples, and vectors have four dimensions. The tokens are those of bert-base-uncased or GPT-2.
"""

import json
import re
import shlex
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from google.protobuf.json_format import MessageToDict, ParseDict

from neuronpipe.api.v1.tasks_pb2 import TaskResult
from neuronpipe.cli.run import first_request
from neuronpipe.core.task_inputs import SAMPLES
from neuronpipe.doors.http.bodies import write_body
from neuronpipe.doors.http.huggingface_tasks import CONVERTERS

# A list or an object without others in it, which is shown on one line.
_SCALARS = re.compile(r"[\[{][^\[\]{}]*[\]}]")
_VECTOR = [0.25, -0.5, 0.125, 0.82]


def _labels(**scores: float) -> dict[str, Any]:
    return {"labels": [{"label": label, "score": score} for label, score in scores.items()]}


def _generated(text: str, *token_ids: int) -> dict[str, Any]:
    return {"sequences": [{"text": text, "token_ids": list(token_ids), "finish_reason": "FINISH_REASON_END"}]}


def _tokens(*rows: list[float]) -> dict[str, Any]:
    data = np.array(rows, "<f4").tobytes()
    return {"data": data, "shape": [len(rows), len(rows[0])], "type": "FEATURE_TYPE_FLOAT32"}


def _entity(text: str, label: str, words: str, score: float) -> dict[str, Any]:
    start = text.index(words)
    return {"label": label, "score": score, "text": words, "start": start, "end": start + len(words)}


def _results() -> Mapping[str, Mapping[str, Any]]:
    names, context = SAMPLES["token_classification"]["text"], SAMPLES["question_answering"]["context"]
    assert isinstance(names, str)
    assert isinstance(context, str)
    found = (("London", 0.97), ("in London", 0.01), ("lived in London", 0.005))
    places = [(text, score, context.index(text)) for text, score in found]
    answers = [
        {"text": text, "score": score, "start": start, "end": start + len(text)} for text, score, start in places
    ]
    vectors = _tokens(_VECTOR, [0.5, 0.5, -0.5, 0.5])
    people = [
        _entity(names, "PER", "Ada Lovelace", 0.998),
        _entity(names, "LOC", "London", 0.999),
        _entity(names, "PER", "Charles Babbage", 0.997),
    ]
    labels = {"PER": "person", "LOC": "city"}
    filled = [
        {"token": "capital", "score": 0.97, "token_id": 3007},
        {"token": "heart", "score": 0.01, "token_id": 2540},
        {"token": "centre", "score": 0.005, "token_id": 2803},
    ]
    mask = str(SAMPLES["fill_mask"]["text"]).index("[MASK]")
    return {
        "text_classification": _labels(POSITIVE=0.999, NEGATIVE=0.001),
        "sentence_embedding": {"embedding": _VECTOR},
        "question_answering": {"answers": answers},
        "token_classification": {"entities": people},
        "fill_mask": {"masks": [{"tokens": filled, "start": mask, "end": mask + len("[MASK]")}]},
        "feature_extraction": vectors,
        "sentence_similarity": {"scores": [0.04, 0.63, 0.02, 0.48]},
        "rerank": {
            "texts": [
                {"index": 1, "score": 0.98},
                {"index": 3, "score": 0.21},
                {"index": 0, "score": 0.01},
                {"index": 2, "score": 0.002},
            ]
        },
        "zero_shot_classification": _labels(sport=0.95, politics=0.03, cooking=0.02),
        "zero_shot_token_classification": {
            "entities": [{**entity, "label": labels[entity["label"]]} for entity in people]
        },
        "image_classification": _labels(**{"tabby cat": 0.81, "tiger cat": 0.12, "lynx": 0.03}),
        "image_embedding": {"embedding": _VECTOR},
        "zero_shot_image_classification": _labels(**{"a cat": 0.91, "a dog": 0.07, "a bicycle": 0.02}),
        "text_generation": _generated(", there was a king.", 11, 612, 373, 257, 5822, 13),
        "summarization": _generated("A tower in Paris.", 83, 7611, 11, 3000, 4),
        "translation": _generated(
            "Der Turm wurde für eine Ausstellung gebaut.", 644, 12057, 1402, 218, 236, 9382, 7719, 5
        ),
        "sparse_embedding": {
            "weights": [
                {"token_id": 4937, "weight": 2.5, "token": "cat"},
                {"token_id": 13523, "weight": 1.875, "token": "mat"},
            ]
        },
        "multi_vector_embedding": vectors,
        "tokenization": {
            "tokens": [
                {"token_id": 101, "text": "[CLS]", "is_special": True},
                {"token_id": 1037, "text": "a", "start": 0, "end": 1},
                {"token_id": 2986, "text": "fine", "start": 2, "end": 6},
                {"token_id": 2154, "text": "day", "start": 7, "end": 10},
                {"token_id": 1012, "text": ".", "start": 10, "end": 11},
                {"token_id": 102, "text": "[SEP]", "is_special": True},
            ]
        },
        "detokenization": {"text": "a fine day."},
    }


def result_of(task: str) -> TaskResult:
    """The result of the task's sample. Raises ValueError for a task without one."""
    results = _results()
    if task not in results:
        raise ValueError(f"tests/reference/answers.py: no result for the sample of {task}; add it to _results()")
    fields = dict(results[task])
    data = fields.pop("data", None)
    result = ParseDict({task: fields}, TaskResult())
    if data is not None:
        getattr(result, task).data = data
    return result


# Responses show every field, zeros included.
_written = partial(MessageToDict, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def result_json(task: str) -> str:
    """The result as gRPC's JSON, the form of `neuronpipe infer`."""
    shown = json.dumps(_written(result_of(task)), indent=2, ensure_ascii=False)
    return _SCALARS.sub(lambda match: " ".join(match[0].split()).replace("[ ", "[").replace(" ]", "]"), shown)


def answer_json(task: str) -> str:
    """The answer to `first_request`, as the HTTP port writes it; empty for a request of another protocol."""
    if task not in CONVERTERS or task == "text_generation":
        return ""
    converter = CONVERTERS[task]
    *_, sent = shlex.split(first_request("NAME", task, ""))
    body = converter.takes.validate_python(json.loads(sent))
    answer = converter.write_answer(getattr(result_of(task), task), body.inputs, body)
    return write_body([answer] if converter.is_nested else answer).decode()
