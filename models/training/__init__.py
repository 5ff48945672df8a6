"""The making of the embedded pair: a text becomes a tokenizer, a target, and a draft distilled from it."""
