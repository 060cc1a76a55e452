"""The base of all other packages: errors, items, tensors, settings, logs. It imports no network, task or runtime."""
