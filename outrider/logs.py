"""Logs of a process: structured, to stderr, so that stdout belongs to the program. Knows no services.

In a terminal people read them; anywhere else every line is one JSON object. A traceback never shows the values of local
variables: those are prompts, token ids and weights.
"""

import logging
import sys

import structlog
from structlog.tracebacks import ExceptionDictTransformer
from structlog.typing import Processor

LEVELS = ("debug", "info", "warning", "error")


def configure(level: str) -> None:
    """Sets up structlog and the standard library's logging, which grpc uses. `level` is one of LEVELS."""
    number = getattr(logging, level.upper())
    logging.basicConfig(
        level=max(number, logging.WARNING), stream=sys.stderr, format="%(levelname)s %(name)s %(message)s"
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *_rendering(sys.stderr.isatty()),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


def _rendering(is_terminal: bool) -> list[Processor]:
    if is_terminal:
        # The default formatter is rich's, which prints local variables.
        return [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
    tracebacks = ExceptionDictTransformer(show_locals=False)
    return [structlog.processors.ExceptionRenderer(tracebacks), structlog.processors.JSONRenderer()]
