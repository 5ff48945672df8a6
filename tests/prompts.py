"""The openings that tests continue are those that measurements continue."""

from bench.openings import OPENINGS

__all__ = ["OPENINGS"]
