"""The post-process stage: the model's outputs to results."""
