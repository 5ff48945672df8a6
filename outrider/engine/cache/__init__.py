"""Paged keys and values, and the prefixes that they are found by."""
