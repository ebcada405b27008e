"""The full-precision cache (see `reference.py` for the definition). Its kernels run as part of an update: `update/`."""
