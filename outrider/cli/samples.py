"""The order in which samples are shown. Knows no view."""

from collections import defaultdict, deque
from collections.abc import Iterator

from outrider.client import Result, Round


class InOrder:
    """Takes the mixed events of several samples and gives them sample by sample, in order of their index.

    The first sample's pass at once. Those of a later one are kept until the samples before it have ended, and from then
    on pass at once too.
    """

    def __init__(self) -> None:
        self._current = 0
        self._kept: defaultdict[int, deque[Round | Result]] = defaultdict(deque)

    def take(self, event: Round | Result) -> Iterator[Round | Result]:
        """Yields what may be shown now."""
        self._kept[event.sample_index].append(event)
        while self._kept[self._current]:
            shown = self._kept[self._current].popleft()
            self._current += isinstance(shown, Result)
            yield shown
