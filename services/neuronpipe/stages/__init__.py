"""The three stages of the pipeline. Each is a service, or a part of a process with all three."""
