"""Generates texts by continuous batching: at each step sequences join the batch, and leave it."""
