"""Batch transform: files of rows through a model, in shards that can be resumed. Stands above the pipeline."""
