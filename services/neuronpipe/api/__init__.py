"""Messages that cross a process border, generated from protos/: our own API (v1), and protocols of other projects."""
