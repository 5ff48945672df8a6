"""The torch half of Outrider: models, caches, kernels, sampling."""
