"""Anthropic's routes, translated to chat completions and back."""
