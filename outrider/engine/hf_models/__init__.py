"""Models whose code is transformers' and whose attention, cache and products are ours.

outrider.engine.models.checkpoints loads it by name when a model needs it, so that no other service pays for
transformers.
"""
