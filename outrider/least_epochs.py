"""Rollbacks that overtook the open of their session: which epochs are over before it exists. Knows no sessions.

A Rollback is a call of its own and may arrive first. Without a memory of it, the older open behind it would be taken.
"""

# A Rollback overtakes an open by milliseconds, so a newer one never pushes out one that still matters.
MAX_REMEMBERED = 1024


class LeastEpochs:
    """For the sessions that were unknown at their Rollback the least epoch that may open them; the newest ones only."""

    def __init__(self, most: int = MAX_REMEMBERED) -> None:
        self._most = most
        self._epochs: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._epochs)

    def get(self, session_id: bytes) -> int:
        """The least epoch of an open, 0 when there was no Rollback."""
        return self._epochs.get(session_id, 0)

    def remember(self, session_id: bytes, epoch: int) -> None:
        """A Rollback has begun an epoch of a session that is not known; an older one changes nothing."""
        epoch = max(epoch, self._epochs.pop(session_id, 0))
        self._epochs[session_id] = epoch
        if len(self._epochs) > self._most:
            del self._epochs[next(iter(self._epochs))]

    def forget(self, session_id: bytes) -> None:
        """The session is known now, and holds its epoch itself."""
        self._epochs.pop(session_id, None)
