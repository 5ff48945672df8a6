"""Counts the answers of the REST surface by route and status, refusals included. Knows no request's content.

Clients choose paths and methods, so those that nobody serves share one label: it must not be theirs to make new ones.
"""

from prometheus_client import CollectorRegistry, Counter
from starlette.types import Scope

METHODS = frozenset({"GET", "HEAD", "POST", "OPTIONS", "PUT", "PATCH", "DELETE"})
OTHER = "other"
# The client was gone before there was a status.
NO_STATUS = "none"


class AnswerCounts:
    """One counter with three labels."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ("method", "route", "status")
        self._answers = Counter("outrider_http_answers", "Answers over REST.", labels, registry=registry)

    def count(self, scope: Scope, status: int) -> None:
        """A request is over; 0 when it has no status."""
        method = scope["method"] if scope["method"] in METHODS else OTHER
        # What a middleware answers has met no route, even where its path has one.
        route = getattr(scope.get("route"), "path", OTHER)
        self._answers.labels(method, route, str(status or NO_STATUS)).inc()
