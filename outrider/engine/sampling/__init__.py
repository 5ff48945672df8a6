"""The way from logits to distributions, draws and log-probabilities."""
