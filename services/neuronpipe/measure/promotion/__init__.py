"""Moves a version of a model up in steps to all of the requests, as long as its guards hold; else back."""
