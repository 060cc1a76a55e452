"""Acceptance of a machine: models compiled and measured on it, in one folder to send back."""
