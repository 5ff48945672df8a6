"""API keys: the file that lists them, who a key belongs to, and what its holder may use."""
