"""Wrong usage of `python -m gateway`: its last line is the sentence, also when a supervisor reads it."""

import sys

import pytest

from outrider.process.children import Launch, ServiceFailed, ServiceProcess

NEEDED = ("--target", "127.0.0.1:1", "--tokenizer", "models/target", "--target-wait-seconds", "0.1")


async def refusal(*flags: str) -> tuple[int, str, list[str]]:
    """Exit code and sentence of a gateway that does not start, and the lines that it logged before."""
    lines: list[str] = []
    launch = Launch("gateway", (sys.executable, "-m", "gateway", *flags))
    with pytest.raises(ServiceFailed) as failure:
        await ServiceProcess.start(launch, lines.append)
    return failure.value.code, failure.value.message, lines


PLACES = "HOST:PORT or dns:NAME:PORT with a port in [1, 65535], or file:PATH"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--max-requests", "0"), "--max-requests is 0, but must be at least 1"),
        (("--draft", "host"), f"draft is 'host', but must be {PLACES}"),
        (("--target", ""), f"target is '', but must be {PLACES}"),
    ],
)
async def test_wrong_values_are_one_sentence(flags: tuple[str, ...], sentence: str) -> None:
    """Exit code 64, and gRPC has not been asked yet."""
    code, message, lines = await refusal(*NEEDED, *flags)
    assert code == 64
    assert message.endswith(f"before it was ready: {sentence}")
    assert lines == []


@pytest.mark.slow
async def test_unknown_flags_have_no_box() -> None:
    """The last line of the parser's text is words, not a border."""
    code, message, _ = await refusal(*NEEDED, "--unknown")
    assert code == 64
    assert "--unknown" in message
    assert message.isascii()
