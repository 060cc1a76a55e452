"""The whole pipeline in one process."""
