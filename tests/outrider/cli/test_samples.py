"""Samples are shown in order of their index, however their events mix."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.command_line import RESULT

from outrider.cli.samples import InOrder
from outrider.client import Result, Round


def events_of(index: int, num_rounds: int) -> list[Round | Result]:
    """All events of one sample."""
    return [*(Round((), f"{index}.{place}", index) for place in range(num_rounds)), replace(RESULT, sample_index=index)]


def test_the_first_sample_waits_for_nothing() -> None:
    """Its events pass at once, and those of the second only behind its end."""
    in_order = InOrder()
    [one, end], [other, other_end] = events_of(0, 1), events_of(1, 1)
    assert list(in_order.take(other)) == []
    assert list(in_order.take(one)) == [one]
    assert list(in_order.take(end)) == [end, other]
    assert list(in_order.take(other_end)) == [other_end]


@pytest.mark.parametrize("count", [1, 3])
@given(data=st.data())
def test_every_event_is_shown_once_and_in_order(count: int, data: st.DataObject) -> None:
    """Whatever the order in which the samples take turns."""
    samples = [events_of(index, data.draw(st.integers(0, 3))) for index in range(count)]
    turns = data.draw(st.permutations([index for index, events in enumerate(samples) for _ in events]))
    waiting = [iter(events) for events in samples]
    in_order = InOrder()
    shown = [event for index in turns for event in in_order.take(next(waiting[index]))]
    assert shown == [event for events in samples for event in events]
