"""The flags of `neuronpipe infer` and `trace` that take the place of JSON: one for each field of a task's input."""

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from neuronpipe.cli.at_file import read_bytes, read_lines, read_text
from neuronpipe.cli.parser import complete_at_file, completed_by
from neuronpipe.core.errors import SetupError

if TYPE_CHECKING:
    from neuronpipe.api.v1.tasks_pb2 import TaskInput


# A PNG of one pixel, in Base64.
_PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
# Task → the fields of its input, with all that it needs.
EXAMPLES: Mapping[str, Mapping[str, object]] = {
    "text_classification": {"text": "A fine day.", "top_k": 2, "function": "softmax", "truncation": "right"},
    "sentence_embedding": {"text": "A fine day.", "truncation": "right"},
    "question_answering": {"question": "Who sat on the mat?", "context": "The cat sat on the mat.", "top_k": 1},
    "token_classification": {"text": "Ada Lovelace lived in London.", "aggregation": "simple"},
    "fill_mask": {"text": "Paris is the [MASK] of France.", "top_k": 3},
    "feature_extraction": {"text": "A fine day.", "pooling": "mean", "type": "float32"},
    "sentence_similarity": {"source": "A fine day.", "texts": ["Lovely weather.", "The train is late."]},
    "rerank": {"query": "Who sat on the mat?", "texts": ["A dog ran.", "The cat sat on the mat."], "top_n": 1},
    "zero_shot_classification": {
        "text": "The match ended in a draw.",
        "candidate_labels": ["sports", "politics"],
        "hypothesis_template": "This text is about {}.",
        "multi_label": False,
    },
    "image_classification": {"image": _PIXEL, "top_k": 3},
    "image_embedding": {"image": _PIXEL},
    "zero_shot_image_classification": {"image": _PIXEL, "candidate_labels": ["a cat", "a dog"]},
    "text_generation": {"prompt": "A fine day", "options": {"max_new_tokens": 20}},
    "summarization": {"text": "The cat sat on the mat. It was a fine day.", "options": {"max_new_tokens": 20}},
    "translation": {"text": "A fine day.", "truncation": "right"},
    "sparse_embedding": {"text": "A fine day.", "top_k": 8},
    "multi_vector_embedding": {"text": "Who sat on the mat?", "is_query": True},
    "tokenization": {"text": "A fine day.", "skip_special_tokens": False},
    "detokenization": {"token_ids": [1037, 2986, 2154, 1012]},
}

# Field → flag, where the field's own name is long, or too near to --target.
_RENAMED = {"candidate_labels": "labels", "targets": "target_tokens"}
_MAX_UINT32 = 2**32 - 1

_TEXT = {
    "text": "the text; repeat it for several inputs",
    "text_pair": "a second text, for models of pairs",
    "prompt": "text-generation: the text to continue; --json has its options",
    "question": "the question",
    "context": "the text that is searched for answers",
    "query": "what the texts are ranked by",
    "source": "what the texts are compared with",
    "source_language": "translation: the language of the text, as the model names it",
    "target_language": "translation: the language of the translation, as the model names it",
    "prompt_name": "sentence-embedding, sparse-embedding: the prompt to put before the text, by its name",
    "hypothesis_template": "with --labels: a sentence with {} in place of the label",
}
_TEXTS = {
    "texts": "the texts for --query or --source; without these, several inputs",
    "candidate_labels": "zero-shot-classification, of texts and of images: the labels to choose from",
    "ignore_labels": "token-classification: labels to leave out",
    "targets": "fill-mask: compare only these tokens",
}
_NUMBER = {
    "top_k": "how many labels, answers or tokens to return",
    "top_n": "rerank: how many texts to return",
    "dimensions": "keep only the first N numbers of a vector",
    "max_answer_tokens": "question-answering: the longest answer",
    "chunk_tokens": "feature-extraction: a vector for each N tokens of a text that is read as a whole",
    "window_stride_tokens": "by how many tokens the windows of a long text overlap",
}
_NUMBERS = {"token_ids": "ids of the model's own tokenizer, in place of a text"}
_SWITCH = {
    "allow_no_answer": "question-answering: having no answer is one, too",
    "keep_all_labels": "token-classification: leave no label out",
    "is_query": "multi-vector-embedding: the text is a query, not a document",
    "multi_label": "zero-shot-classification: any number of labels may fit",
    "skip_special_tokens": "tokenization, detokenization: leave out tokens such as [CLS]",
    "skip_normalize": "sentence-embedding, image-embedding: do not scale the vector to length one",
}
_CHOICE = {
    "function": ("softmax sigmoid none", "how logits become scores"),
    "truncation": ("error right left", "what happens to a text that is too long (default: error)"),
    "aggregation": (
        "none simple first average max",
        "token-classification: how tokens become entities (default: simple)",
    ),
    "pooling": ("none cls mean", "feature-extraction: what becomes of the token vectors (default: none)"),
    "precision": (
        "float32 int8 uint8 binary ubinary",
        "sentence-embedding, image-embedding: the vector's numbers, or a bit for each",
    ),
    "type": ("float32 float16 int8", "feature-extraction: the numbers' type on the wire (default: float32)"),
}
_IMAGE = {"image": "a JPEG, PNG or WebP file, or -; repeat it for several inputs"}
FIELDS = (*_TEXT, *_TEXTS, *_NUMBER, *_NUMBERS, *_SWITCH, *_CHOICE, *_IMAGE)
# Several values of these are several inputs.
_REPEATED = ("text", "image")
_OPTIONS = ("hypothesis_template", "ignore_labels", "prompt_name", "targets", "source_language", "target_language")
# Task → the fields without which it has no input.
NEEDED: Mapping[str, Sequence[str]] = {
    task: [one for one in example if one in (*_TEXT, *_TEXTS, *_NUMBERS, *_IMAGE) and one not in _OPTIONS]
    for task, example in EXAMPLES.items()
}


def flag(field: str) -> str:
    """The flag of a field."""
    return "--" + _RENAMED.get(field, field).replace("_", "-")


def example_of(task: str) -> str:
    """The input of a task as JSON, to change and send."""
    return json.dumps({task: EXAMPLES[task]}, indent=2, ensure_ascii=False)


def add_input_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    inputs = parser.add_argument_group(
        "input", "A TEXT may be @FILE, or - for standard input: the whole file, or where several are taken its lines."
    )
    options = parser.add_argument_group("options of tasks")

    def add(field: str, help: str, **settings: Any) -> argparse.Action:
        is_input = field in (*_TEXT, *_TEXTS, *_IMAGE) and field not in _OPTIONS
        return (inputs if is_input else options).add_argument(flag(field), dest=field, help=help, **settings)

    for field, help in _TEXT.items():
        action = "append" if field in _REPEATED else "store"
        completed_by(add(field, help, action=action, metavar="TEXT"), complete_at_file)
    for field, help in _TEXTS.items():
        completed_by(add(field, help, action="extend", nargs="+", metavar="TEXT"), complete_at_file)
    for field, help in _IMAGE.items():
        add(field, help, action="append", metavar="FILE")
    for field, help in _NUMBER.items():
        add(field, help, type=_parse_number, metavar="N")
    for field, help in _NUMBERS.items():
        add(field, help, type=_parse_number, action="extend", nargs="+", metavar="ID")
    for field, help in _SWITCH.items():
        add(field, help, action="store_const", const=True)
    for field, (words, help) in _CHOICE.items():
        add(field, help, choices=words.split())


def read_fields(options: argparse.Namespace) -> dict[str, Any]:
    """The fields that are given, with what is in files; `text` and `image` are lists. Raises SetupError."""
    given = {field: value for field in FIELDS if (value := getattr(options, field)) is not None}
    fields = {field: _read(field, value) for field, value in given.items()}
    if has_inputs_in_texts(options):
        fields["text"] = [*fields.get("text", ()), *fields.pop("texts")]
    return fields


def has_inputs_in_texts(options: argparse.Namespace) -> bool:
    """Whether --texts are inputs, rather than the texts of one input."""
    return options.texts is not None and options.query is None and options.source is None


def make_inputs(task: str, fields: Mapping[str, Any]) -> "list[TaskInput]":
    """The inputs of a task that takes these fields."""
    from neuronpipe.api.v1.tasks_pb2 import TaskInput

    kinds: Mapping[str, Any] = _kind_of(task).fields_by_name
    shared = {name: value for name, value in fields.items() if name not in _REPEATED}
    if "aggregation" in kinds:
        shared.setdefault("aggregation", "simple")  # as of the clients' method
    for name in shared.keys() & _CHOICE:
        prefix = kinds[name].enum_type.values[0].name.removesuffix("UNSPECIFIED")
        shared[name] = prefix + shared[name].upper()
    repeated = next((name for name in _REPEATED if name in fields), None)
    each = [{repeated: value} for value in fields[repeated]] if repeated else [{}]
    # protobuf makes messages of dictionaries.
    return [TaskInput(**cast(Any, {task: {**shared, **one}})) for one in each]


def choose_task(tasks: Sequence[str], fields: Mapping[str, Any], whose: str) -> str:
    """The first of the tasks that takes the fields. Raises SetupError, which says what those of `whose` take."""
    known = [task for task in tasks if task in NEEDED]  # a newer gateway may have others
    for task in known:
        if {*NEEDED[task]} <= {*fields} <= {*_kind_of(task).fields_by_name}:
            return task
    given = ", ".join(map(flag, fields)) or "no input"
    takes = "; ".join(map(_usage, known)) or f"its tasks are {', '.join(tasks)}"
    raise SetupError(f"{whose} has no task for {given}; {takes}")


def _kind_of(task: str) -> Any:
    from neuronpipe.api.v1.tasks_pb2 import TaskInput

    return getattr(TaskInput(), task).DESCRIPTOR


def _usage(task: str) -> str:
    needed = NEEDED[task]
    fields: Mapping[str, Any] = _kind_of(task).fields_by_name
    options = [f"[{flag(name)}]" for name, field in fields.items() if name not in needed and not field.message_type]
    return f"{task.replace('_', '-')} takes {' '.join([*map(flag, needed), *options])}"


def _read(field: str, value: Any) -> Any:
    name = flag(field)
    if field == "image":
        return [read_bytes(file, name) for file in value]
    if field in _TEXTS:
        return read_lines(value, name)
    if field in _REPEATED:
        return [read_text(one, name) for one in value]
    return read_text(value, name) if field in _TEXT else value


def _parse_number(text: str) -> int:
    """The type of flags of whole numbers."""
    if not (text.isascii() and text.isdigit() and int(text) <= _MAX_UINT32):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to {_MAX_UINT32}")
    return int(text)
