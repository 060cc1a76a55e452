"""Authentication: who calls the gateway."""
