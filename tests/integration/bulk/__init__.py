"""Jobs and batch transform."""
