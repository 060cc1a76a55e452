"""Compiled models on disk: what a bundle holds, how it is found and verified, and how it is made."""
