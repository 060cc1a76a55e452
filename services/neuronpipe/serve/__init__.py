"""Composes a gateway and its stages, each of which is in this process or behind a target."""
