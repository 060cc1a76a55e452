"""What crosses a process border, generated from protos/: our own API (v1), and the protocols of others."""
