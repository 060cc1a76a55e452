"""What people would pick instead, serving the benchmark's model, each in a virtual environment of its own.

Only the standard library is imported here, in `running`, `environments` and `__main__`: a peer's libraries are in its
environment.
"""
