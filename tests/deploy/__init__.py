"""Renders the manifests of deploy/ in combinations, and finds their faults: `python -m tests.deploy`."""
