"""The public API of the project as services see it: what crosses a process border, generated from protos/."""
