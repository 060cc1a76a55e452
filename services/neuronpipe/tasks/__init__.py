"""One file for each task. A task encodes an input and decodes the model's outputs. It needs no model and no network."""

from neuronpipe.tasks import (
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
    tokenization,
    zero_shot_classification,
    zero_shot_image_classification,
)
from neuronpipe.tasks.base import Task

# What graphs are compiled for.
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
        text_generation.TASK,
        text_to_text.SUMMARIZATION,
        text_to_text.TRANSLATION,
        sparse_embedding.TASK,
        multi_vector_embedding.TASK,
        image_embedding.TASK,
        zero_shot_image_classification.TASK,
    )
}
# And what every model of texts answers besides, without its graph.
ANSWERED_TASKS = TASKS | {task.name: task for task in (tokenization.TOKENIZATION, tokenization.DETOKENIZATION)}
