"""Every door, with real clients, on local stages, four processes or any gateway."""
