"""Logs of a process: structured, to stderr, so that stdout belongs to the program.

In a terminal people read them; anywhere else every line is one JSON object. A line never has the text of a prompt or an
answer, nor token ids; it has names to find its request by: request_id, session and trace_id. A traceback never shows
the values of local variables, because those are prompts, token ids and weights.
"""

import logging
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import structlog
from structlog.contextvars import bind_contextvars, get_contextvars, unbind_contextvars
from structlog.tracebacks import ExceptionDictTransformer
from structlog.typing import Processor

SHOWN_ID_LEN = 4


def configure(level: str) -> None:
    """Sets up structlog and the standard library's logging, which grpc uses; `level` as in LogLevel."""
    number = getattr(logging, level.upper())
    gathering: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    rendering = _rendering(sys.stderr.isatty())
    foreign = logging.StreamHandler(sys.stderr)
    # Lines of libraries look like ours, and their tracebacks have no more in them.
    foreign.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*gathering, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
        )
    )
    logging.basicConfig(level=max(number, logging.WARNING), handlers=[foreign])
    structlog.configure(
        processors=[*gathering, *rendering],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


@contextmanager
def bound(**values: object) -> Iterator[None]:
    """Puts values on every line of this task, and of the tasks that it starts, until the context is left."""
    before = {name: value for name, value in get_contextvars().items() if name in values}
    bind_contextvars(**values)
    try:
        yield
    finally:
        # Not structlog's own way: its tokens refuse to be given back by another task, which closes a stream at times.
        unbind_contextvars(*values)
        bind_contextvars(**before)


@contextmanager
def request_scope() -> Iterator[str]:
    """Puts a request_id on every line, a new one unless a surface has bound its own; gives the id."""
    request_id = str(get_contextvars().get("request_id") or secrets.token_hex(8))
    with bound(request_id=request_id):
        yield request_id


def session_prefix(session_id: bytes) -> str:
    """Enough of a session's id to find it again in the logs of the other processes."""
    return session_id[:SHOWN_ID_LEN].hex()


def _rendering(is_terminal: bool) -> list[Processor]:
    if is_terminal:
        # The default formatter is rich's, which prints local variables.
        return [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
    tracebacks = ExceptionDictTransformer(show_locals=False)
    return [structlog.processors.ExceptionRenderer(tracebacks), structlog.processors.JSONRenderer()]
