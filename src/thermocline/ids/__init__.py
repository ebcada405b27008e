"""Maps from raw ids to rows: identity, hash, pruned, unified. `idmap.py` has the definition."""
