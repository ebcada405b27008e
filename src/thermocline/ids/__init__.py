"""From a raw id to a row: identity, hash, pruned, unified. See `idmap.py` for the definition."""
