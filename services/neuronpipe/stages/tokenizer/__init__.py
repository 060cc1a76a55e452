"""The pre-process stage: texts to token ids."""
