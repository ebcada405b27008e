"""The Open Inference Protocol, version 2: its messages, its tensors, its two ways over the wire. Knows no models."""
