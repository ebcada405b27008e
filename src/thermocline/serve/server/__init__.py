"""The server: gRPC and HTTP in one event loop, micro-batches, a repository of models, metrics. Knows no tables."""
