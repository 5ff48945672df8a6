"""The target service decides every token."""
