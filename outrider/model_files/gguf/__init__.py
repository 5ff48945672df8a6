"""GGUF files without torch: their metadata, the configuration and the tokenizer in it, and where their tensors lie."""
