"""What the files of a model say, read without torch: names, tokenizer, ends, defaults; and GGUF files."""
