"""Measures a system: load, benchmark, acceptance, drawn traces, and guards of a promotion."""
