"""What was computed before, kept in memory and in Redis: never wrong, never in the way."""
