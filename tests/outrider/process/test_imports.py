"""Imports at the start of a process, which the collector leaves alone."""

import gc

import pytest

from outrider.process.imports import uncollected


@pytest.mark.parametrize("fails", [False, True])
def test_the_collector_looks_at_nothing_that_was_imported(fails: bool) -> None:
    """It rests meanwhile, and afterwards works again on what is new, also when an import fails."""
    try:
        with uncollected():
            assert not gc.isenabled()
            kept = [[]]
            if fails:
                raise ImportError("planted")
    except ImportError:
        assert fails
    assert gc.isenabled()
    assert not any(each is kept for each in gc.get_objects())
    gc.unfreeze()
    assert any(each is kept for each in gc.get_objects())
