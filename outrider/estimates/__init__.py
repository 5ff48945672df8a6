"""Estimates that are learnt while serving: what a step costs by its rows, and which guesses are accepted. Pure."""
