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
# Which byte each character of a byte-level vocabulary stands for (Radford et al., 2019, GPT-2): printable characters of
# Latin-1 for themselves, and the characters from 0x100 on for the other bytes, in order.
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
OTHERS = [byte for byte in range(0x100) if byte not in PRINTABLE]
ALPHABET = {chr(byte): byte for byte in PRINTABLE} | {chr(0x100 + place): byte for place, byte in enumerate(OTHERS)}


@dataclass(frozen=True, slots=True)
class TokenPiece:
    """A token as text and as bytes; `text` is what the bytes say in UTF-8, where they say anything."""

    text: str
    raw: bytes


class TokenPieces:
    """The pieces of a tokenizer, each found when it is asked for first."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._name_of = tokenizer.id_to_token
        # How the tokenizer joins tokens, step by step, as tokenizer.json says it.
        state: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else {}
        self._decoders: list[dict[str, Any]] = state.get("decoders", [state] if state else [])
        kinds = {decoder["type"] for decoder in self._decoders}
        self._is_byte_level = "ByteLevel" in kinds
        self._has_fallback = "ByteFallback" in kinds
        # What was added to a byte-level vocabulary is not spelled in its alphabet.
        added = tokenizer.get_added_tokens_decoder().items()
        self._verbatim = {token_id for token_id, token in added if token.special or self._is_byte_level}
        self._pieces: dict[int, TokenPiece] = {}

    def piece(self, token_id: int) -> TokenPiece:
        """The token alone; a special token by its name."""
        if token_id not in self._pieces:
            name, raw = self._name_of(token_id), b""
            if name is not None:
                raw = name.encode() if token_id in self._verbatim else self._bytes(name)
            try:
                text = f"token_id:{token_id}" if name is None else raw.decode()
            except UnicodeDecodeError:
                shown = (chr(byte) if 0x20 <= byte < 0x7F else f"\\x{byte:02x}" for byte in raw)
                text = f"bytes:{''.join(shown)}"
            self._pieces[token_id] = TokenPiece(text, raw)
        return self._pieces[token_id]

    def _bytes(self, name: str) -> bytes:
        if self._is_byte_level:
            is_spelled = all(character in ALPHABET for character in name)
            return bytes(ALPHABET[character] for character in name) if is_spelled else name.encode()
        found = FALLBACK.fullmatch(name) if self._has_fallback else None
        if found:
            return bytes.fromhex(found[1])
        for decoder in self._decoders:
            # Whatever looks at the ends of a text only, like Strip, has nothing to do with a token in its middle.
            match decoder["type"]:
                case "Replace" if "String" in decoder["pattern"]:
                    name = name.replace(decoder["pattern"]["String"], decoder["content"])
                case "Metaspace":
                    name = name.replace(decoder["replacement"], " ")
                case "WordPiece":
                    # It marks what continues a word, where others mark what begins one.
                    is_inside = name.startswith(decoder["prefix"])
                    name = name.removeprefix(decoder["prefix"]) if is_inside else f" {name}"
                case "BPEDecoder":
                    name = name.replace(decoder["suffix"], " ")
        return name.encode()
