"""Tests of outrider.model_service.sessions: what is remembered of sessions that were not known."""

from outrider.model_service.sessions import MinEpochs


def test_the_newest_epoch_counts() -> None:
    """An older Rollback changes nothing, and a session that is known needs no memory."""
    epochs = MinEpochs()
    assert epochs.get(b"a") == 0
    epochs.remember(b"a", 3)
    epochs.remember(b"a", 2)
    assert epochs.get(b"a") == 3
    epochs.forget(b"a")
    assert epochs.get(b"a") == 0


def test_memory_is_bounded() -> None:
    """The newest Rollbacks are remembered; one that is repeated counts as new."""
    epochs = MinEpochs(maximum=2)
    for session_id in (b"a", b"b", b"a", b"c"):
        epochs.remember(session_id, 2)
    assert len(epochs) == 2
    assert [epochs.get(session_id) for session_id in (b"a", b"b", b"c")] == [2, 0, 2]
