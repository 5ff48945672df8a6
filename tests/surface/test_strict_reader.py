"""The strict reader itself: each thing that a stream must not have is found."""

import json

import pytest
from support.rest.event_streams import check_stream, read_events

FRAME = {
    "id": "chatcmpl-1",
    "object": "chat.completion.chunk",
    "created": 1,
    "model": "m",
    "system_fingerprint": "fp_1",
}


def event(delta: dict[str, str], finish_reason: str | None = None, **changes: object) -> str:
    """A chunk of one choice."""
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
    return f"data: {json.dumps({**FRAME, 'choices': [choice], **changes})}\n\n"


ROLE, HELLO, END = event({"role": "assistant", "content": ""}), event({"content": "h\u00e9"}), event({}, "stop")
DONE = "data: [DONE]\n\n"


def test_a_good_stream_is_read() -> None:
    """Comments are allowed anywhere."""
    stream = read_events(f": one\n\n{ROLE}{HELLO}: two\n\n{END}{DONE}".encode())
    check_stream(stream, is_chat=True)
    assert (stream.text(), stream.comments) == ("h\u00e9", [0, 2])


@pytest.mark.parametrize(
    "raw",
    [
        f"id: 1\n{ROLE}{END}{DONE}",
        f"retry: 1000\n\n{ROLE}{END}{DONE}",
        f"event: token\n{ROLE}{END}{DONE}",
        f"{ROLE}{END}{DONE}{END}",
        f"{ROLE}{END}",
        f"{ROLE}{END}{DONE[:-1]}",
        f"{ROLE}{END}{DONE}{DONE}",
        f"{HELLO}{END}{DONE}",
        f"{ROLE}{HELLO}{DONE}",
        f"{ROLE}{END}{END}{DONE}",
        f"{ROLE}{END}{HELLO}{DONE}",
        f"{ROLE}{ROLE}{END}{DONE}",
        f"{ROLE}{event({'content': 'x'}, id='chatcmpl-2')}{END}{DONE}",
        f"{ROLE}{event({'content': 'x'}, created=2)}{END}{DONE}",
        f"{ROLE}{event({'content': ''})}{END}{DONE}",
        f"{ROLE}{event({}, 'eos')}{DONE}",
        f"{ROLE}{event({'content': 'x'}, usage={})}{END}{DONE}",
        f'{ROLE}data: {{"error": {{}}}}\n\n{DONE}',
        f"{ROLE}data: {{}}\n\n{DONE}",
        f"{ROLE}data: NaN\n\n{END}{DONE}",
        f"{ROLE}data: nothing\n\n{END}{DONE}",
        f"{ROLE}\n\n{END}{DONE}",
        ROLE.replace("\n\n", "\r\n\r\n") + END + DONE,
    ],
)
def test_a_bad_stream_is_refused(raw: str) -> None:
    """Whatever is wrong with it."""
    with pytest.raises((AssertionError, ValueError, KeyError, TypeError)):
        check_stream(read_events(raw.encode()), is_chat=True)


def test_half_a_character_is_refused() -> None:
    """Bytes must be UTF-8."""
    with pytest.raises(UnicodeDecodeError):
        read_events(HELLO.encode("latin-1").replace(b"\\u00e9", b"\xe9"))
