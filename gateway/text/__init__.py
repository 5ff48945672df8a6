"""Between text and token ids: tokenizer, pieces, chat templates."""
