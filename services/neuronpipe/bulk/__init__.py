"""Bulk work above the gateway: files of rows (transform), and asynchronous jobs."""
