"""Guesses without a model: what follows the same tokens elsewhere, in a request's own text and in others."""
