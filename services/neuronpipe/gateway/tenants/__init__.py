"""What tenants may do: their models, quotas and shares."""
