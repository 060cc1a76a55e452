"""Messages that nobody would write, sent to real servers."""
