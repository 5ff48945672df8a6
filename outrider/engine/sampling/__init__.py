"""From logits to distributions, draws and log-probabilities."""
