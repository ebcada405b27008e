"""Memory tables in language models: time of a training step and of decoding (`speed`), and validation loss (`quality`)."""
