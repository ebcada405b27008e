"""Click logs and histories as streams of batches, from files and generators, and metrics of predictions."""
