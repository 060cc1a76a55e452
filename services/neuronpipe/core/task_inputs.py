"""The inputs of tasks as people write them: each field, and a sample of each task, is declared here once.

These entries make the flags and examples of `neuronpipe infer`, the forms of the console, and the tensors of the Open
Inference Protocol. They also make the inputs of the load generator and the samples of docs/tasks.md. A new task is an
entry in SAMPLES, a new field of an input (tasks.proto) an entry in FIELDS.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

# A text, a list of texts, a file's bytes, a whole number, a list of numbers, a real number, a truth value, or a word of
# an enumeration.
FieldKind = Literal["text", "texts", "image", "number", "numbers", "real", "switch", "words"]


@dataclass(frozen=True, slots=True)
class InputField:
    """A field of an input. Its name is the name of its field in the messages of inputs.

    - `text`: its meaning, for the command line.
    - `words`: the values of an enumeration, in its order.
    - `is_option`: no input needs the field, though it is a text or a list of texts.
    - `flag`: its flag, if the field's own name is long, or too similar to another.
    """

    kind: FieldKind
    text: str
    words: str = ""
    is_option: bool = False
    flag: str = ""

    @property
    def is_input(self) -> bool:
        """Whether the field is a part of an input, and not an option."""
        return self.kind in ("text", "texts", "image") and not self.is_option


FIELDS: Mapping[str, InputField] = {
    "text": InputField("text", "the text; repeat it for several inputs"),
    "text_pair": InputField("text", "a second text, for models of pairs"),
    "prompt": InputField("text", "text-generation: the text to continue; --json has its options"),
    "question": InputField("text", "the question"),
    "context": InputField("text", "the text that is searched for answers"),
    "query": InputField("text", "query by which the texts are ranked"),
    "source": InputField("text", "text with which the texts are compared"),
    "source_language": InputField(
        "text", "translation: the language of the text, as the model names it", is_option=True
    ),
    "target_language": InputField(
        "text", "translation: the language of the translation, as the model names it", is_option=True
    ),
    "prompt_name": InputField(
        "text", "sentence-embedding, sparse-embedding: the prompt to put before the text, by its name", is_option=True
    ),
    "hypothesis_template": InputField(
        "text", "with --labels: a sentence with {} in the place of the label", is_option=True
    ),
    "texts": InputField("texts", "the texts for --query or --source; without these, several inputs"),
    "candidate_labels": InputField(
        "texts", "zero-shot tasks, of texts, tokens and images: the labels to choose from", flag="labels"
    ),
    "ignore_labels": InputField("texts", "token-classification: labels to leave out", is_option=True),
    "targets": InputField("texts", "fill-mask: compare only these tokens", is_option=True, flag="target_tokens"),
    "image": InputField("image", "a JPEG, PNG or WebP file, or -; repeat it for several inputs"),
    "top_k": InputField("number", "how many labels, answers or tokens to return"),
    "top_n": InputField("number", "rerank: how many texts to return"),
    "dimensions": InputField("number", "keep only the first N numbers of a vector"),
    "max_answer_tokens": InputField("number", "question-answering: the longest answer"),
    "chunk_tokens": InputField(
        "number", "feature-extraction: a vector for each N tokens of a text that is read as a whole"
    ),
    "max_chunks": InputField(
        "number", "sentence-embedding, rerank: read a text that is too long in at most N chunks (default: none)"
    ),
    "max_text_tokens": InputField("number", "rerank: number of tokens of each text to read (default: all)"),
    "truncation_tokens": InputField("number", "with --truncation right or left: the most tokens to keep"),
    "window_stride_tokens": InputField("number", "by how many tokens the windows of a long text overlap"),
    "token_ids": InputField("numbers", "ids of the model's own tokenizer, instead of a text"),
    "threshold": InputField(
        "real", "zero-shot-token-classification: the score that an entity must exceed (default: 0.5)"
    ),
    "allow_nested": InputField("switch", "zero-shot-token-classification: entities may contain others"),
    "allow_no_answer": InputField("switch", "question-answering: allow 'no answer' as a result"),
    "keep_all_labels": InputField("switch", "token-classification: leave no label out"),
    "is_query": InputField("switch", "multi-vector-embedding: the text is a query, not a document"),
    "multi_label": InputField(
        "switch", "zero-shot-classification, of texts and of tokens: any number of labels may fit"
    ),
    "return_sparse": InputField("switch", "sentence-embedding: also return the weights of tokens (bge-m3)"),
    "return_multi_vector": InputField("switch", "sentence-embedding: also return the vectors of tokens (bge-m3)"),
    "skip_special_tokens": InputField("switch", "tokenization, detokenization: leave out tokens such as [CLS]"),
    "skip_normalize": InputField(
        "switch", "sentence-embedding, image-embedding: do not scale the vector to length one"
    ),
    "function": InputField("words", "how logits become scores", "softmax sigmoid none"),
    "truncation": InputField("words", "what happens to a text that is too long (default: error)", "error right left"),
    "aggregation": InputField(
        "words", "token-classification: how tokens become entities (default: simple)", "none simple first average max"
    ),
    "pooling": InputField(
        "words", "feature-extraction: how token vectors become one vector (default: none)", "none cls mean"
    ),
    "precision": InputField(
        "words",
        "sentence-embedding, image-embedding: the vector's numbers, or a bit for each",
        "float32 int8 uint8 binary ubinary",
    ),
    "type": InputField(
        "words", "feature-extraction: the numbers' type on the wire (default: float32)", "float32 float16 int8"
    ),
}

_TEXTS = (
    "A dog chased the ball through the park.",
    "The cat slept on the mat all afternoon.",
    "Trains to Berlin leave every hour.",
    "A kitten was curled up on the rug.",
)
# A PNG of one pixel, in Base64.
_PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
# Task → the fields of an input, with every needed field, as in JSON.
SAMPLES: Mapping[str, Mapping[str, object]] = {
    "text_classification": {"text": "What a wonderful day this has been.", "top_k": 2},
    "sentence_embedding": {"text": "The cat slept on the mat."},
    "question_answering": {
        "question": "Where did Ada Lovelace live?",
        "context": "Ada Lovelace lived in London. In 1843 she described how the Analytical Engine of Charles Babbage "
        "could compute Bernoulli numbers.",
        "top_k": 3,
    },
    "token_classification": {
        "text": "Ada Lovelace lived in London and worked with Charles Babbage.",
        "aggregation": "simple",
    },
    "fill_mask": {"text": "Paris is the [MASK] of France.", "top_k": 3},
    "feature_extraction": {"text": "The cat slept on the mat."},
    "sentence_similarity": {"source": "A cat lies on a carpet.", "texts": _TEXTS},
    "rerank": {"query": "Where did the cat sleep?", "texts": _TEXTS},
    "zero_shot_classification": {
        "text": "The match ended in a draw after extra time.",
        "candidate_labels": ("sport", "politics", "cooking"),
        "hypothesis_template": "This text is about {}.",
        "multi_label": False,
    },
    "zero_shot_token_classification": {
        "text": "Ada Lovelace lived in London and worked with Charles Babbage.",
        "candidate_labels": ("person", "city", "date"),
        "threshold": 0.5,
    },
    "image_classification": {"image": _PIXEL, "top_k": 3},
    "image_embedding": {"image": _PIXEL},
    "zero_shot_image_classification": {"image": _PIXEL, "candidate_labels": ("a cat", "a dog", "a bicycle")},
    "text_generation": {"prompt": "Once upon a time", "options": {"max_new_tokens": 40}},
    "summarization": {
        "text": "The Eiffel Tower is a tower in Paris. It was built for an exhibition, and is 330 metres high.",
        "options": {"max_new_tokens": 40},
    },
    "translation": {"text": "The tower was built for an exhibition.", "options": {"max_new_tokens": 40}},
    "sparse_embedding": {"text": "The cat slept on the mat."},
    "multi_vector_embedding": {"text": "Where did the cat sleep?", "is_query": True},
    "tokenization": {"text": "A fine day.", "skip_special_tokens": False},
    "detokenization": {"token_ids": (1037, 2986, 2154, 1012)},
}
# Task → the fields that an input must have.
NEEDED: Mapping[str, Sequence[str]] = {
    task: [name for name in sample if name in FIELDS and (FIELDS[name].is_input or FIELDS[name].kind == "numbers")]
    for task, sample in SAMPLES.items()
}
# The tasks that generate a text.
GENERATING = tuple(task for task, sample in SAMPLES.items() if "options" in sample)
