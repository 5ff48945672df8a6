"""Text to token ids and back, through the target's own tokenizer.

Encoding adds the special tokens that the tokenizer's post-processor asks for, as transformers does. Decoding leaves
special tokens out and never shows half a character.
"""

import asyncio
import codecs
import re
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import structlog

from gateway.text.token_pieces import TokenPiece, TokenPieces
from outrider.grammar import Grammar, GrammarEngine
from outrider.model_files.tokenizer_files import find_doubt, load_tokenizer
from outrider.model_files.vocabulary import Vocabulary, misfit

log = structlog.get_logger()

LONG_TEXT = 2_000  # characters; encoding more takes long enough to be felt by other requests
HUGE_TEXT = 32_000  # characters; longer ones are waited for by each other alone
LONG_PROMPT = 100  # tokens; the same of spelling
# How models that were trained to fill a gap learn what is around it: Qwen's coders and CodeGemma; StarCoder and
# Granite; Codestral. What is no {place} is the name of a token.
GAPS = (
    "<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>",
    "<fim_prefix>{prefix}<fim_suffix>{suffix}<fim_middle>",
    "[SUFFIX]{suffix}[PREFIX]{prefix}",
)
PLACES = re.compile(r"\{prefix\}|\{suffix\}")
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MAX_PARTIAL = 3  # a UTF-8 character of four bytes may lack one, and each byte may show as a character of its own
WINDOW = 12


class Tokenizer:
    """The tokenizer of a model, for texts and for prompts."""

    def __init__(self, model: str) -> None:
        """Reads that of a folder, a GGUF file, a model on the hub, or the one inside a sized model.

        Raises ModelRefused.
        """
        self._tokenizer = load_tokenizer(model)
        if reason := find_doubt(model):
            log.warning("tokens may be wrong", model=model, reason=reason)
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.added_tokens = {token.content: token_id for token_id, token in added.items()}
        """The ids of tokens that no text is cut into but by their names."""
        self.special_tokens = frozenset(token.content for token in added.values() if token.special)
        """The names of those of them that have no text of their own."""
        self._special_lens = {len(name) for name in self.special_tokens}
        self._special_starts = {name[:1] for name in self.special_tokens}
        self.longest_token = max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)), default=1)
        """Characters of the longest name of a token; a token stands for no more of a text."""
        self._vocabulary = Vocabulary.of(self._tokenizer.get_vocab(with_added_tokens=True).items())
        self._pieces = TokenPieces(self._tokenizer)
        # One text at a time in each: a character takes some forty bytes meanwhile.
        self._encoder = ThreadPoolExecutor(1, "encoder")
        self._huge_encoder = ThreadPoolExecutor(1, "huge-encoder")
        self._grammars: GrammarEngine | None = None
        self._making_grammars = asyncio.Lock()

    async def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        """Token ids of a text, with the special tokens of a whole prompt; a long one is encoded off the event loop."""
        if len(text) <= LONG_TEXT:
            return tuple(self._tokenizer.encode(text, add_special_tokens=special).ids)
        # As a batch of one: for a single text the library keeps all other threads from running, the loop's too.
        encode = partial(self._tokenizer.encode_batch_fast, [text], add_special_tokens=special)
        encoder = self._encoder if len(text) <= HUGE_TEXT else self._huge_encoder
        [encoding] = await asyncio.get_running_loop().run_in_executor(encoder, encode)
        return tuple(encoding.ids)

    def around_gap(self, prefix: str, suffix: str) -> str | None:
        """The prompt of a text whose middle is wanted; None for a model that has no tokens to say so."""
        forms = (form for form in GAPS if self.added_tokens.keys() >= {*filter(None, PLACES.split(form))})
        form = next(forms, None)
        return None if form is None else form.format(prefix=prefix, suffix=suffix)

    def name(self, token_id: int) -> str | None:
        """Name of a token in the vocabulary; None of an id that no token has."""
        return self._tokenizer.id_to_token(token_id)

    async def spell(self, token_ids: Sequence[int]) -> list[str]:
        """The text that each token completes; that of a long list is found off the event loop."""
        if len(token_ids) <= LONG_PROMPT:
            return self._spell(token_ids)
        return await asyncio.to_thread(self._spell, token_ids)

    def _spell(self, token_ids: Sequence[int]) -> list[str]:
        detokenizer = self.detokenizer()
        texts = [detokenizer.push(token_id) for token_id in token_ids]
        return [*texts[:-1], texts[-1] + detokenizer.flush()] if texts else texts

    async def grammar(self, text: str, end_ids: Collection[int], salt: bytes) -> Grammar:
        """A grammar of its canonical text over these tokens, for a new session; `end_ids` are the model's. What was
        compiled with one salt is not remembered with another.

        Raises GrammarRefused, and ValueError about a tokenizer that grammars cannot be made for.
        """
        return await (await self._engine(end_ids)).compiled(text, salt)

    async def grammar_fault(self, text: str, end_ids: Collection[int]) -> str | None:
        """What is wrong with a grammar of which only that is of interest; None for nothing."""
        return await (await self._engine(end_ids)).fault(text)

    async def _engine(self, end_ids: Collection[int]) -> GrammarEngine:
        async with self._making_grammars:
            if self._grammars is None:
                size = self.vocabulary().size
                self._grammars = await asyncio.to_thread(GrammarEngine, self._tokenizer.to_str(), size, end_ids)
        return self._grammars

    def decode(self, token_ids: list[int]) -> str:
        """Text of all token ids at once, without special tokens."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def verbatim(self, token_ids: list[int]) -> str:
        """Text of all token ids with the names of special tokens. In a thread it lets others run, as `encode` does."""
        return str(self._tokenizer.decode_batch([token_ids], skip_special_tokens=False)[0])

    def piece(self, token_id: int) -> TokenPiece:
        """A token alone, with its bytes, whatever its neighbours; of any id, one of no token too."""
        return self._pieces.piece(token_id)

    def vocabulary(self) -> Vocabulary:
        """Ids and tokens, to compare with those of a model."""
        return self._vocabulary

    def misfit(self, model: Vocabulary) -> str | None:
        """Reason why a model's ids do not mean these tokens, a sentence; None where they do, as far as it has rows."""
        return misfit(self._tokenizer, self._vocabulary, model)

    def detokenizer(self) -> "Detokenizer":
        """A new detokenizer at the beginning of a text."""
        return Detokenizer(self)

    def names_special(self, text: str) -> bool:
        """Whether a text has the name of a special token in it."""
        return any(
            text[start : start + length] in self.special_tokens
            for start, character in enumerate(text)
            if character in self._special_starts
            for length in self._special_lens
        )

    def is_special(self, token_id: int) -> bool:
        """Whether a token has no text of its own, like an end-of-sequence token."""
        return token_id in self._special_ids


class Detokenizer:
    """Turns tokens into text one by one; all pieces joined are the text of all tokens decoded at once.

    Decoders look at neighbours (bytes of one character, a space that is dropped at the beginning), so a window of
    recent tokens is decoded anew for each token. Only replacement characters at its end can still change: at most
    three, which stay back until more tokens or the end settle them. The window is cut where both sides decode alone
    to what they decode to together, so the cost of a token does not grow with the text. The idea of a window is
    text-generation-inference's; its rule, hold everything while the end is U+FFFD, would hold garbage for ever. With
    byte-fallback tokenizers a run of byte tokens that turns invalid after a whole character shows less broken here.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._emitted_len = 0  # characters of the window's text that are out already
        self._limit = WINDOW

    def push(self, token_id: int) -> str:
        """Takes one token; returns the text that it completes, which may be empty."""
        if self._tokenizer.is_special(token_id):
            return ""
        self._window.append(token_id)
        text = self._tokenizer.decode(self._window)
        end = len(text)
        if text.endswith(REPLACEMENT):
            end -= min(end - len(text.rstrip(REPLACEMENT)), MAX_PARTIAL)
        piece = text[self._emitted_len : end]
        self._emitted_len += len(piece)
        if len(self._window) >= self._limit:
            # The front of the window goes at the last place that is a boundary and has all its text out.
            for cut in range(len(self._window) - 2, len(self._window) - WINDOW, -1):
                head, tail = self._tokenizer.decode(self._window[:cut]), self._tokenizer.decode(self._window[cut:])
                gap = len(text) - len(head) - len(tail)  # 1 where a decoder drops the space before a first word
                emitted_len = self._emitted_len - (len(text) - len(tail))
                if emitted_len > 0 and text == head + " " * gap + tail and gap <= 1:
                    self._window, self._emitted_len, self._limit = self._window[cut:], emitted_len, WINDOW
                    break
            else:
                self._limit = 2 * len(self._window)  # without a boundary, try again rarely enough to stay linear
        return piece

    def name(self, token_id: int) -> str:
        """Text of a token that is decoded alone."""
        return self._tokenizer.piece(token_id).text

    def name_of_special(self, token_id: int) -> str | None:
        """The name of a special token, which `push` leaves out; None for any other."""
        return self.name(token_id) if self._tokenizer.is_special(token_id) else None

    def flush(self, *, is_cut: bool = False) -> str:
        """Returns what was held back. Half a character, which nothing completes now, shows as U+FFFD, but not at all
        where a limit has cut off the rest of it.
        """
        piece = self._tokenizer.decode(self._window)[self._emitted_len :]
        self._emitted_len += len(piece)
        if is_cut:
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            decoder.decode(b"".join(self._tokenizer.piece(token_id).raw for token_id in self._window))
            if decoder.getstate()[0]:
                return piece.rstrip(REPLACEMENT)
        return piece
