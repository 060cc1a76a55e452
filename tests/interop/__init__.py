"""Clients, proxies, floods and frames that nobody would write, against gRPC as all services speak it."""
