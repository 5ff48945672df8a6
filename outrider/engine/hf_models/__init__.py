"""Models whose code is transformers' and whose attention, cache and products are ours. Alone imports transformers.

Nothing outside imports this package; outrider.engine.models.checkpoints loads it by name when a model needs it.
"""
