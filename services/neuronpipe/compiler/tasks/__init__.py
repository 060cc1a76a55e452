"""The compiler's part of each task: a constant with the task's name, in one of the files here."""

from collections.abc import Sequence
from pathlib import Path

import transformers

from neuronpipe.compiler import onnx
from neuronpipe.compiler.modules import SourceModule, pretrained_model
from neuronpipe.compiler.stacked_adapters import with_adapters
from neuronpipe.compiler.tasks import images, labels, texts, vectors
from neuronpipe.compiler.tasks.base import SourceTask
from neuronpipe.compiler.tokenizers import SourceTokenizer
from neuronpipe.compiler.weights import check_missing, check_tokens, with_unused_weights
from neuronpipe.tasks import TASKS

_DECLARED = {name: value for module in (images, labels, texts, vectors) for name, value in vars(module).items()}
SOURCE_TASKS: dict[str, SourceTask] = {task: _DECLARED[task.upper()] for task in TASKS}


def load_module(
    folder: Path, task: str, tokenizer: SourceTokenizer, attention: str = "", adapters: Sequence[str] = ()
) -> SourceModule:
    """Loads the model for a task, with transformers' choice of attention by default. Raises SetupError.

    `adapters`: each NAME=FOLDER; see stacked_adapters.py.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    onnx.check_task(folder, task)
    module = with_adapters(SOURCE_TASKS[task].load(folder, tokenizer), adapters)
    check_tokens(folder, module)
    if onnx.onnx_model(module.module):
        return module
    check_missing(folder, module, SOURCE_TASKS[task].encode(module, ["one text"]))
    if attention:
        pretrained_model(module.module).set_attn_implementation(attention)
    return with_unused_weights(module)
