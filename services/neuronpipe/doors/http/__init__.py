"""The HTTP door: one server, and a file for each protocol that people's clients already speak."""
