"""A program for each client. It reads cases as JSON, one a line, and writes what came of each:
tests/interop/cases.py.
"""
