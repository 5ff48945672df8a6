"""Parts of a model's answer that are no text: reasoning, and calls of tools, in the format of its family."""
