"""What a request waits for before its first token, for somebody who watches it."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Wait:
    """How far a request is on its way to its first token: its place in the queue, and then how much is read of it."""

    place: int = 0
    """Where it stands in the queue: 1 comes next; 0 when it stands there no more, or not yet."""
    read_len: int = 0
    """Tokens of the prompt that the target has read, as far as it says so."""
    _is_over: bool = False
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def stand(self, place: int) -> None:
        """Says where the request stands in the queue now."""
        if place != self.place:
            self.place = place
            self._changed.set()

    def read(self, read_len: int) -> None:
        """Says how much of the prompt is read, of which the most counts."""
        if read_len > self.read_len:
            self.read_len = read_len
            self._changed.set()

    def end(self) -> None:
        """Says that the request waits no more."""
        self._is_over = True
        self._changed.set()

    async def changes(self) -> AsyncGenerator[None, None]:
        """Yields whenever something is another than before, until the request waits no more."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self._is_over:
                return
            yield
