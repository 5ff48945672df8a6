"""The torch half of Outrider: models, caches, kernels, sampling. Knows nothing about gRPC, the gateway or text."""
