"""Runs neuronpipe as its users do."""
