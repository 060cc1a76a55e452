"""Caches in memory and in Redis. A failing or slow Redis never fails or delays a request beyond its limit."""
