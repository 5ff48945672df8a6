"""Whether a stream is a terminal that may be drawn on. Knows no command."""

import os
from typing import TextIO


def is_rich(stream: TextIO) -> bool:
    """Whether tables may be drawn and drawn again: a terminal that is not dumb, and NO_COLOR is not set.

    NO_COLOR asks for no colours only (no-color.org), but who sets it reads lines, in a log or by voice.
    """
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
