"""What every other part stands on: errors, stages, tensors, settings, logs. Knows no network, task or runtime."""
