"""Bodies that become far more than they are, or take long to look at, of each kind that there is."""

MAX_BYTES = 4 << 20


def path_of(body: bytes) -> str:
    """The route that takes a body."""
    return "/v1/chat/completions" if b'"messages"' in body[:20] else "/v1/completions"


def filled(begin: bytes, unit: bytes, end: bytes) -> bytes:
    """A body with as many units as it may have."""
    return begin + unit * ((MAX_BYTES - len(begin) - len(end)) // len(unit)) + end


CALL = (
    b'{"messages":[{"role":"assistant","tool_calls":[{"id":"a","type":"function","function":{"name":"f","arguments":"'
)
BODIES = {
    "empty lists": filled(b'{"prompt":[', b"[],", b"[]]}"),
    "empty objects": filled(b'{"prompt":[', b"{},", b"{}]}"),
    "nested lists": filled(b'{"prompt":[', b"[[[[]]]],", b"[]]}"),
    "deep lists": b'{"prompt":' + b"[" * 49_000 + b"]" * 49_000 + b"}",
    "texts": filled(b'{"prompt":[', b'"",', b'""]}'),
    "token ids": filled(b'{"prompt":[', b"257,", b"1]}"),
    "fractions": filled(b'{"prompt":[', b"1.5,", b"1]}"),
    "keys": b'{"prompt":"fox"' + b"".join(b',"x%d":1' % number for number in range(45_000)) + b"}",
    "parts": b'{"messages":[{"role":"user","content":[%b]}]}' % b",".join([b'{"type":"text","text":"a"}'] * 20_000),
    "a call's arguments": filled(CALL + rb"{\"a\":[", b"[],", b'[]]}"}}]}]}'),
    "wide text": filled('{"prompt":"\U0001f600'.encode(), b"fox ", b'"}'),
    "escapes": filled(b'{"prompt":"', rb"\u0066", b'"}'),
    "no JSON": filled(b"", b'["",', b""),
}
