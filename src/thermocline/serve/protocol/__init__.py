"""The Open Inference Protocol, version 2: messages, tensors, and their gRPC and HTTP encodings. Imports no models."""
