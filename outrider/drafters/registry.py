"""Drafters that every service offers beside those of its model. A line here adds one, for drafts and targets alike.

docs/drafters.md goes through an example.
"""

from collections.abc import Callable, Sequence
from typing import Any

from outrider.drafters.drafter import Drafter
from outrider.engine.runner import ModelRunner

REGISTRY: Sequence[Callable[[ModelRunner], Drafter[Any]]] = ()
"""Makers of such drafters, given the service's model; a name belongs to one of them."""


def registered(runner: ModelRunner) -> list[Drafter[Any]]:
    """The drafters of the registry for a service's model."""
    return [make(runner) for make in REGISTRY]
