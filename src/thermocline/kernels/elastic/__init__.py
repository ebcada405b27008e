"""Find raw ids in a key table, count their lookups, and give rows to new ids. `reference.py` has the definition."""
