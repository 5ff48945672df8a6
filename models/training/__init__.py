"""The making of the embedded pair: a text becomes a tokenizer, a target, and a draft distilled from it."""

import os

# oneDNN keeps what it compiled for the latest 1,024 shapes, and steps have ever new ones: on a processor with AMX that
# took 40 MB a step, 21 GB in half an hour. It reads this at its first product.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "160")
