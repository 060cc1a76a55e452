"""Authentication of the gateway's callers."""
