"""The whole story on one small machine: `thermocline demo`. See `story.py` for what it tells."""
