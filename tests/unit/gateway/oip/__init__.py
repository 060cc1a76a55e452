"""gateway/doors/oip."""
