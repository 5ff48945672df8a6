"""Acceptance rules as pure functions of probabilities and coins, a module for each with its paper."""
