"""Generated texts through the doors."""
