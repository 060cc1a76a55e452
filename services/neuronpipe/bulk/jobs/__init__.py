"""Asynchronous inference: jobs in Redis Streams, their API at the gateway, and the workers that run them.

It stands above the gateway, which workers call as everybody does, with bulk priority (docs/jobs.md).
"""
