"""What a process stands on: its life and settings, TLS, telemetry, caches, and objects by URI. Knows no model."""
