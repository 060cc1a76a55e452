"""Limits, tenants and overload."""
