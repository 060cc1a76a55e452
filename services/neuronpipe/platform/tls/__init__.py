"""Certificates and keys: files that are checked before they are used, and read anew when they change."""
