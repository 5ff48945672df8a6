"""What holds for every test."""

import os

from outrider.cli.pairs import PAIR_VARIABLE, Pair

# The embedded pair is quick, has known acceptance, and needs nothing from elsewhere.
os.environ.setdefault(PAIR_VARIABLE, Pair.TALES)
