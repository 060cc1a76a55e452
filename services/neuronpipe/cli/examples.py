"""An input of each task."""

import json
from collections.abc import Mapping

# A PNG of one pixel, in Base64.
_IMAGE = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
# Task → the fields of its input.
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
    "image_classification": {"image": _IMAGE, "top_k": 3},
    "image_embedding": {"image": _IMAGE},
    "zero_shot_image_classification": {"image": _IMAGE, "candidate_labels": ["a cat", "a dog"]},
    "text_generation": {"prompt": "A fine day", "options": {"max_new_tokens": 20}},
    "summarization": {"text": "The cat sat on the mat. It was a fine day.", "options": {"max_new_tokens": 20}},
    "translation": {"text": "A fine day.", "truncation": "right"},
    "sparse_embedding": {"text": "A fine day.", "top_k": 8},
    "multi_vector_embedding": {"text": "Who sat on the mat?", "is_query": True},
    "tokenization": {"text": "A fine day.", "skip_special_tokens": False},
    "detokenization": {"token_ids": [1037, 2986, 2154, 1012]},
}


def example_of(task: str) -> str:
    """The input of a task as JSON, to change and send."""
    return json.dumps({task: EXAMPLES[task]}, indent=2, ensure_ascii=False)
