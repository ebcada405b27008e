"""One folder that opens anywhere: `save`, `load`, and a reader that needs no model. `docs/checkpoints.md` has the format."""
