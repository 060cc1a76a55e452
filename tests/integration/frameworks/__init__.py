"""Clients of other projects in .venv-frameworks, an environment of their own: their dependencies are not those of
neuronpipe. Nothing of neuronpipe is imported there.
"""
