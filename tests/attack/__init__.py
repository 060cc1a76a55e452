"""Attacks of one tenant, or of a caller without a key, and what a victim notices of them.

`make attack` runs all of them for as long as the figures on docs/attacks.md need, and `make test` a sample.
"""
