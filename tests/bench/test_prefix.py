"""bench.prefix: what it measures, and that it finds tokens that differ."""

import pytest
from support.tiny_models import write_tiny_model

from bench import prefix
from bench.common import TokensDiffer
from bench.prefix import measure
from bench.streams import BareTargetStream
from outrider.model_service.settings import ModelServiceSettings


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> ModelServiceSettings:
    """A tiny target."""
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny") / "model", "llama", vocab_size=257)
    return ModelServiceSettings(str(folder), dtype="float32", kv_tokens=1024)


async def test_every_kind_of_prompt_is_timed_with_and_without_the_cache(settings: ModelServiceSettings) -> None:
    """As often as there are turns."""
    times_ms = await measure(settings, 64, 2)
    assert len(times_ms) == 6
    assert all(len(times) == 2 and min(times) > 0 for times in times_ms.values())


async def test_tokens_that_differ_end_the_run(settings: ModelServiceSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """A figure of wrong answers is worth nothing."""
    numbers = iter(range(100))

    async def wrong(stream: BareTargetStream) -> tuple[int, float]:
        await stream.open()
        await stream.end()
        return next(numbers), 1.0

    monkeypatch.setattr(prefix, "first_token", wrong)
    with pytest.raises(TokensDiffer, match="the first tokens are"):
        await measure(settings, 64, 1)
