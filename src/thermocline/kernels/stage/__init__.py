"""Rows of a table in host memory, staged on the card ahead of their batch (see `reference.py` for the definition)."""
