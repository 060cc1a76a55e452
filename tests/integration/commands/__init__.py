"""The commands of the command line, and the demo."""
