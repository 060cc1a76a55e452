"""One file for each task, with what the compiler needs to know about it."""

from pathlib import Path

import transformers

from neuronpipe.compiler.modules import SourceModule, pretrained_model
from neuronpipe.compiler.source_checks import check_tokens
from neuronpipe.compiler.tasks import (
    feature_extraction,
    fill_mask,
    image_classification,
    image_embedding,
    multi_vector_embedding,
    question_answering,
    rerank,
    sentence_embedding,
    sentence_similarity,
    sparse_embedding,
    text_classification,
    text_generation,
    text_to_text,
    token_classification,
    zero_shot_classification,
    zero_shot_image_classification,
)
from neuronpipe.compiler.tasks.base import SourceTask
from neuronpipe.compiler.tokenizers import SourceTokenizer
from neuronpipe.compiler.weights import check_missing

SOURCE_TASKS: dict[str, SourceTask] = {
    "text_classification": text_classification.TASK,
    "sentence_embedding": sentence_embedding.TASK,
    "question_answering": question_answering.TASK,
    "token_classification": token_classification.TASK,
    "fill_mask": fill_mask.TASK,
    "feature_extraction": feature_extraction.TASK,
    "sentence_similarity": sentence_similarity.TASK,
    "rerank": rerank.TASK,
    "zero_shot_classification": zero_shot_classification.TASK,
    "image_classification": image_classification.TASK,
    "text_generation": text_generation.TASK,
    "summarization": text_to_text.SUMMARIZATION,
    "translation": text_to_text.TRANSLATION,
    "sparse_embedding": sparse_embedding.TASK,
    "multi_vector_embedding": multi_vector_embedding.TASK,
    "image_embedding": image_embedding.TASK,
    "zero_shot_image_classification": zero_shot_image_classification.TASK,
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
