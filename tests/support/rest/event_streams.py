"""Reads a stream of events byte by byte, and refuses whatever a strict client could stumble over. Opens no connection.

Allowed are comments, and events of one `data:` line each. So there is no `id:`, no `retry:` and no `event:`, which make
clients parse an empty event or a chunk that is none.
"""

import json
from dataclasses import dataclass, field
from typing import Any

DONE = "[DONE]"
CONSTANT = ("id", "object", "created", "model", "system_fingerprint")
FINISH_REASONS = {"stop", "length"}
Chunk = dict[str, Any]


def strict_json(text: str) -> Any:
    """JSON without NaN, infinities and repeated keys, none of which it has."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len({key for key, _ in pairs}) == len(pairs), f"repeated keys in {pairs}"
        return dict(pairs)

    return json.loads(text, parse_constant=refuse, object_pairs_hook=unique)


@dataclass
class EventStream:
    """What came: chunks in order, and how it ended. Comments are known by the number of chunks before each."""

    chunks: list[Chunk] = field(default_factory=list)
    comments: list[int] = field(default_factory=list)
    error: dict[str, Any] | None = None
    is_done: bool = False

    @property
    def usage_chunk(self) -> Chunk | None:
        """The last chunk, when it has no choices."""
        return self.chunks[-1] if self.chunks and not self.chunks[-1]["choices"] else None

    def of_choice(self, index: int) -> list[dict[str, Any]]:
        """The parts of one answer."""
        return [choice for chunk in self.chunks for choice in chunk["choices"] if choice["index"] == index]

    def text(self, index: int = 0) -> str:
        """All deltas of an answer, joined."""
        parts = self.of_choice(index)
        return "".join(part["text"] if "text" in part else part["delta"].get("content") or "" for part in parts)

    def finish_reasons(self, index: int = 0) -> list[str]:
        """Finish reasons that were said of an answer."""
        return [part["finish_reason"] for part in self.of_choice(index) if part["finish_reason"] is not None]


def read_events(raw: bytes) -> EventStream:
    """Parses a whole stream. Raises AssertionError or ValueError about the first byte that should not be there."""
    stream = EventStream()
    text = raw.decode("utf-8", "strict")
    assert "\r" not in text
    assert text.endswith("\n\n") or not text, f"cut off within an event: {text[-80:]!r}"
    for event in text.split("\n\n")[:-1]:
        assert not stream.is_done, f"{event!r} behind {DONE}"
        assert stream.error is None, f"{event!r} behind an error"
        assert "\n" not in event, f"an event of several lines: {event!r}"
        _take(event, stream)
    return stream


def _take(event: str, stream: EventStream) -> None:
    if event.startswith(":"):
        stream.comments.append(len(stream.chunks))
        return
    assert event.startswith("data: "), f"neither a comment nor data: {event!r}"
    payload = event.removeprefix("data: ")
    if payload == DONE:
        stream.is_done = True
        return
    content = strict_json(payload)
    if "error" in content:
        assert set(content) == {"error"}
        stream.error = content["error"]
    else:
        stream.chunks.append(content)


def check_stream(stream: EventStream, *, is_chat: bool, count: int = 1, wants_usage: bool = False) -> None:
    """Everything that holds of a stream that ended well."""
    assert stream.is_done
    assert stream.error is None
    check_frame(stream, is_chat=is_chat)
    check_usage(stream, wants_usage=wants_usage)
    assert {choice["index"] for chunk in stream.chunks for choice in chunk["choices"]} == set(range(count))
    for index in range(count):
        check_choice(stream.of_choice(index), is_chat=is_chat)


def check_frame(stream: EventStream, *, is_chat: bool) -> None:
    """What all chunks have in common never changes."""
    first = stream.chunks[0]
    assert first["object"] == ("chat.completion.chunk" if is_chat else "text_completion")
    assert first["id"].startswith("chatcmpl-" if is_chat else "cmpl-")
    assert first["system_fingerprint"].startswith("fp_")
    assert type(first["created"]) is int
    for chunk in stream.chunks:
        assert {name: chunk[name] for name in CONSTANT} == {name: first[name] for name in CONSTANT}


def check_usage(stream: EventStream, *, wants_usage: bool) -> None:
    """Usage comes once, last, without choices, and only when it was asked for; until then it is null."""
    assert (stream.usage_chunk is not None) == wants_usage
    before = stream.chunks[:-1] if wants_usage else stream.chunks
    assert all(chunk["choices"] for chunk in before)
    assert all(chunk.get("usage") is None for chunk in before)
    if wants_usage:
        assert all("usage" in chunk for chunk in before)
        usage = stream.chunks[-1]["usage"]
        assert usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"]


def check_choice(parts: list[dict[str, Any]], *, is_chat: bool) -> None:
    """An answer: its role first and alone, its text, and one reason to end, which is its last word."""
    assert [part["finish_reason"] is not None for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1]["finish_reason"] in FINISH_REASONS
    if is_chat:
        assert parts[0]["delta"] == {"role": "assistant", "content": ""}
        assert not any("role" in part["delta"] for part in parts[1:])
        assert parts[-1]["delta"] == {}
        assert all(part["delta"]["content"] or part.get("logprobs") for part in parts[1:-1])
    else:
        assert all("delta" not in part for part in parts)
