"""Target and draft that cannot be a pair, as real processes."""

from pathlib import Path

import pytest
from support.models.tiny_models import TARGET, write_tiny_model

from outrider.cli.local_stack import Stack, start_stack
from outrider.process.children import ServiceFailed, Supervisor


@pytest.mark.slow
async def test_a_draft_of_another_vocabulary_is_refused_in_one_sentence(tmp_path: Path) -> None:
    """A user who named both learns with 78 which model does not fit, and in what it differs; no gateway is started."""
    draft = write_tiny_model(tmp_path / "stranger", "llama", vocab_size=257)
    async with Supervisor(lambda _sentence: None, lambda _name, _line: None) as supervisor:
        with pytest.raises(ServiceFailed) as caught:
            await start_stack(supervisor, Stack(str(TARGET), str(draft)))
    assert caught.value.code == 78
    sentence = str(caught.value)
    assert sentence.startswith("The draft model stranger does not fit")
    assert "4096" in sentence
    assert "257" in sentence
    assert "\n" not in sentence
