"""One file a task. A task encodes an input and decodes the model's outputs; it knows no model and no network."""

from neuronpipe.tasks import image_classification, question_answering, sentence_embedding, text_classification
from neuronpipe.tasks.base import Task

TASKS: dict[str, Task] = {
    task.name: task for task in (text_classification.TASK, sentence_embedding.TASK, question_answering.TASK, image_classification.TASK)
}
