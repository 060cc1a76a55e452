"""One file a task. A task encodes an input and decodes the model's outputs; it depends on no model and no network."""

from neuronpipe.tasks import (
    feature_extraction,
    fill_mask,
    image_classification,
    question_answering,
    rerank,
    sentence_embedding,
    sentence_similarity,
    text_classification,
    token_classification,
    zero_shot_classification,
)
from neuronpipe.tasks.base import Task

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        text_classification.TASK,
        sentence_embedding.TASK,
        question_answering.TASK,
        token_classification.TASK,
        fill_mask.TASK,
        feature_extraction.TASK,
        sentence_similarity.TASK,
        rerank.TASK,
        zero_shot_classification.TASK,
        image_classification.TASK,
    )
}
