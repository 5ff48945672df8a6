"""How the embedded pair is made: a text becomes a tokenizer, a target, and a draft distilled from it."""
