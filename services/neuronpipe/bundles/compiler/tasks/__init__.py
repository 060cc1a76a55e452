"""One file a task: what the compiler needs to know of it."""

from pathlib import Path

import transformers

from neuronpipe.bundles.compiler.modules import SourceModule, set_attention
from neuronpipe.bundles.compiler.tasks import image_classification, question_answering, sentence_embedding, text_classification
from neuronpipe.bundles.compiler.tasks.base import SourceTask
from neuronpipe.bundles.compiler.tokenizers import SourceTokenizer

SOURCE_TASKS: dict[str, SourceTask] = {
    "text_classification": text_classification.TASK,
    "sentence_embedding": sentence_embedding.TASK,
    "question_answering": question_answering.TASK,
    "image_classification": image_classification.TASK,
}


def load_module(folder: Path, task: str, tokenizer: SourceTokenizer, attention: str = "") -> SourceModule:
    """Loads the model for a task; `attention` is transformers' attn_implementation, its own choice where empty.

    Raises SetupError for a model that cannot have the task.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    module = SOURCE_TASKS[task].load(folder, tokenizer)
    if attention:
        set_attention(module, attention)
    return module
