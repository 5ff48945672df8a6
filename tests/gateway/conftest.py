"""What the gateway's tests share."""

from pathlib import Path

import pytest
from support.services.markov_services import write_tokenizer


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    """A folder with a tokenizer of twelve words."""
    return write_tokenizer(tmp_path)
