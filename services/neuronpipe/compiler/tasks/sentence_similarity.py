"""Compiles for sentence similarity: the same graph as for sentence embedding."""

from dataclasses import replace
from functools import partial

from neuronpipe.compiler.tasks import sentence_embedding

TASK = replace(sentence_embedding.TASK, load=partial(sentence_embedding.load_embedder, task="sentence_similarity"))
