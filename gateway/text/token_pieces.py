"""Each token alone, as log-probabilities show it: its exact bytes, and a text that can be written down.

A piece is the token as it stands in the middle of a text, so the pieces of a whole text may begin with a space more
than the text, where a tokenizer puts one before the first word. Bytes that are no text alone are written as OpenAI
writes them, `bytes:â`, and an id that no token has as vLLM writes it, `token_id:4100`.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

import tokenizers

FALLBACK = re.compile("<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class TokenPiece:
    """A token as text and as bytes; `text` is what the bytes say in UTF-8, where they say anything."""

    text: str
    raw: bytes


class TokenPieces:
    """The pieces of a tokenizer, each found when it is asked for first."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._name_of = tokenizer.id_to_token
        self._decoders = _decoders(tokenizer)
        kinds = {decoder["type"] for decoder in self._decoders}
        self._is_byte_level = "ByteLevel" in kinds
        self._has_fallback = "ByteFallback" in kinds
        # What was added to a byte-level vocabulary is not spelled in its alphabet.
        added = tokenizer.get_added_tokens_decoder().items()
        self._verbatim = {token_id for token_id, token in added if token.special or self._is_byte_level}
        self._pieces: dict[int, TokenPiece] = {}

    def piece(self, token_id: int) -> TokenPiece:
        """The token alone; a special token by its name."""
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._find(token_id)
        return piece

    def _find(self, token_id: int) -> TokenPiece:
        name = self._name_of(token_id)
        if name is None:
            return TokenPiece(f"token_id:{token_id}", b"")
        raw = name.encode() if token_id in self._verbatim else self._bytes(name)
        return TokenPiece(_written(raw), raw)

    def _bytes(self, name: str) -> bytes:
        if self._is_byte_level:
            is_spelled = all(character in ALPHABET for character in name)
            return bytes(ALPHABET[character] for character in name) if is_spelled else name.encode()
        found = FALLBACK.fullmatch(name) if self._has_fallback else None
        if found:
            return bytes.fromhex(found[1])
        for decoder in self._decoders:
            name = _decoded(decoder, name)
        return name.encode()


def _decoders(tokenizer: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """How a tokenizer joins tokens, step by step, as tokenizer.json says it."""
    if tokenizer.decoder is None:
        return []
    last: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    steps: list[dict[str, Any]] = last.get("decoders", [last])
    return steps


def _written(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(chr(byte) if 0x20 <= byte < 0x7F else f"\\x{byte:02x}" for byte in raw)


def _alphabet() -> dict[str, int]:
    """Which byte each character of a byte-level vocabulary stands for (Radford et al., 2019, GPT-2).

    Printable characters of Latin-1 stand for themselves, and the others are moved behind them, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


ALPHABET = _alphabet()


def _decoded(decoder: dict[str, Any], name: str) -> str:
    """A token behind one step of a decoder. What looks at the ends of a text only, like Strip, changes no token."""
    match decoder["type"]:
        case "Replace" if "String" in decoder["pattern"]:
            return name.replace(decoder["pattern"]["String"], decoder["content"])
        case "Metaspace":
            return name.replace(decoder["replacement"], " ")
        case "WordPiece":
            # It marks what goes on a word, where others mark what begins one.
            prefix = decoder["prefix"]
            return name.removeprefix(prefix) if name.startswith(prefix) else f" {name}"
        case "BPEDecoder":
            return name.replace(decoder["suffix"], " ")
    return name
