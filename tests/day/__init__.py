"""A day in production, in minutes: a whole system, its callers, and what may happen to it."""
