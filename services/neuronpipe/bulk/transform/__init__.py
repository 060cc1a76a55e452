"""Batch transform: files of rows through a model, in shards that can be resumed. This package is above the pipeline."""
