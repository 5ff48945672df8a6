"""REST: what OpenAI's clients speak, over the frontend."""
