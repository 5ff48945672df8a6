"""A quick draft that counts, and may lie, and a client of it."""

from collections.abc import Iterator

import pytest
from support.basics import PATIENCE_S
from support.services.counting_draft import VOCABULARY, CountingDraft

from outrider.drafting import DraftClient


@pytest.fixture
def draft() -> Iterator[CountingDraft]:
    with CountingDraft() as running:
        yield running


@pytest.fixture
def quick(draft: CountingDraft) -> Iterator[DraftClient]:
    with DraftClient([draft.address], vocabulary=VOCABULARY) as client:
        client.wait(PATIENCE_S)
        yield client
