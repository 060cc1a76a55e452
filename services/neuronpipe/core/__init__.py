"""The base of all other packages: errors, items, tensors, settings, logs. It knows no network, task or runtime."""
