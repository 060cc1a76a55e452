"""The post-process stage, which turns a model's outputs into results."""
