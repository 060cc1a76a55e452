"""Tenants of a gateway: their models, quotas and shares."""
