"""Asynchronous inference: jobs in Redis, their API at the gateway, and the workers that run them.

This package is above the gateway, which workers call like any client, with bulk priority (docs/jobs.md).
"""
