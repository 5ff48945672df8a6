"""What the gateway's tests share."""

from pathlib import Path

import pytest
from support.markov_services import WORDS
from tokenizers import Tokenizer, models, pre_tokenizers


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    """A folder with a tokenizer of twelve words."""
    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<end>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(["<end>"])
    made.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path)
