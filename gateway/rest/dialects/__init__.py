"""Other protocols than chat completions, translated to it and back: Anthropic's messages and OpenAI's responses."""
