"""Texts to look up in: a file of tokens, sorted by what stands before each, that every process maps and none loads."""
