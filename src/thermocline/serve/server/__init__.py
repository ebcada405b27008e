"""The server: gRPC and HTTP in one event loop, dynamic batching, a model repository, metrics. Only `model_loader` knows
tables."""
