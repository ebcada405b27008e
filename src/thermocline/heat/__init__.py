"""How hot each row is: counted, kept in files, merged, compared and shown."""
