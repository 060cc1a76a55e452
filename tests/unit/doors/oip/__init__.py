"""doors/oip."""
