"""OpenAI's routes, completions, chat completions and responses, and the inner form of a body that all others become."""
