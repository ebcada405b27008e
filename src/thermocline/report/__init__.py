"""Reports: one HTML file each, with pictures, that can be read anywhere. Knows nothing of tables, heat or plans."""
