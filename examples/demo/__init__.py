"""The whole story on one small machine: `make demo`. See `pipeline.py` for what it tells."""
