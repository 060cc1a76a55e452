"""The base of a process: its life and settings, TLS, telemetry, caches, and objects by URI. It knows no model."""
