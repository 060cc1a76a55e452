"""The protocols that a gateway speaks, one a file. A door parses, calls the pipeline, and writes."""
