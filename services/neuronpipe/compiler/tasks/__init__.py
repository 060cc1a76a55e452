"""One file for each task, with what the compiler needs to know about it."""

from pathlib import Path

import transformers

from neuronpipe.compiler.modules import SourceModule, check_missing, check_tokens, pretrained_model
from neuronpipe.compiler.tasks.base import SourceTask
from neuronpipe.compiler.tasks.images import IMAGE_CLASSIFICATION, IMAGE_EMBEDDING, ZERO_SHOT_IMAGE_CLASSIFICATION
from neuronpipe.compiler.tasks.labels import (
    FILL_MASK,
    QUESTION_ANSWERING,
    RERANK,
    TEXT_CLASSIFICATION,
    TOKEN_CLASSIFICATION,
    ZERO_SHOT_CLASSIFICATION,
)
from neuronpipe.compiler.tasks.texts import SUMMARIZATION, TEXT_GENERATION, TRANSLATION
from neuronpipe.compiler.tasks.vectors import (
    FEATURE_EXTRACTION,
    MULTI_VECTOR_EMBEDDING,
    SENTENCE_EMBEDDING,
    SENTENCE_SIMILARITY,
    SPARSE_EMBEDDING,
)
from neuronpipe.compiler.tokenizers import SourceTokenizer

SOURCE_TASKS: dict[str, SourceTask] = {
    "text_classification": TEXT_CLASSIFICATION,
    "sentence_embedding": SENTENCE_EMBEDDING,
    "question_answering": QUESTION_ANSWERING,
    "token_classification": TOKEN_CLASSIFICATION,
    "fill_mask": FILL_MASK,
    "feature_extraction": FEATURE_EXTRACTION,
    "sentence_similarity": SENTENCE_SIMILARITY,
    "rerank": RERANK,
    "zero_shot_classification": ZERO_SHOT_CLASSIFICATION,
    "image_classification": IMAGE_CLASSIFICATION,
    "text_generation": TEXT_GENERATION,
    "summarization": SUMMARIZATION,
    "translation": TRANSLATION,
    "sparse_embedding": SPARSE_EMBEDDING,
    "multi_vector_embedding": MULTI_VECTOR_EMBEDDING,
    "image_embedding": IMAGE_EMBEDDING,
    "zero_shot_image_classification": ZERO_SHOT_IMAGE_CLASSIFICATION,
}


def load_module(folder: Path, task: str, tokenizer: SourceTokenizer, attention: str = "") -> SourceModule:
    """Loads the model for a task. `attention` is transformers' attn_implementation; empty means its own choice.

    Raises SetupError for a model that cannot have the task.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    module = SOURCE_TASKS[task].load(folder, tokenizer)
    check_tokens(folder, module)
    check_missing(folder, module, SOURCE_TASKS[task].encode(module, ["one text"]))
    if attention:
        pretrained_model(module.module).set_attn_implementation(attention)
    return module
