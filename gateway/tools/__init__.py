"""What a model says apart from text: reasoning, and calls of tools, in the format of its family."""
