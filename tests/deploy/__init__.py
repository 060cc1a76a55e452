"""Renders the manifests of deploy/ in every combination, and finds their faults: `python -m tests.deploy`."""
