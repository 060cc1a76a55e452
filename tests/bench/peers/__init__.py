"""What people would pick instead, serving the benchmark's model, each in a virtual environment of its own.

Launchers (`*_server`, `*_alone`) run there, with what they import of this package: none of it imports neuronpipe.
"""
