"""The openings that tests continue are those that measurements continue."""

from bench.common import OPENINGS

__all__ = ["OPENINGS"]
