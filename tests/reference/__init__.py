"""Writes docs/reference/, the pages that are made of the code.

Run: python -m tests.reference          writes the pages
     python -m tests.reference --check  shows how they differ from what the code says
"""
