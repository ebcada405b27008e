"""Kernels of the row exchange between ranks (definition: `reference.py`)."""
