"""Which tokens may follow under a constraint: its canonical text, compiled for a vocabulary.

A grammar is a pure function of the answer's tokens: nothing is ever rolled back, and no state goes its own way beside
them. What a matcher costs is bounded by counts of its own work, so that a grammar that was compiled once is compiled
everywhere.

Copies of a matcher cost microseconds, but they share a lexer, which remembers whatever any of them was asked and is of
no more use to all of them when it has exhausted a limit. So they are for guesses only. What is committed is decided by
a Follower, whose lexer has read nothing but the answer.
"""

import asyncio
import json
import os
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, StructTag, get_version, grammar_from

from outrider.constraint import WHITESPACE, Constraint, ConstraintKind
from outrider.errors import InvalidRequest, OutriderError

ENGINE = f"llguidance {get_version()}"
# Of one grammar, as counts and not times. Those of a row are its alternatives at one place, so there have to be more
# than choices; but they are searched one by one, and an ambiguous grammar costs their square.
LIMITS = LLParserLimits(
    max_items_in_row=1_200,
    initial_lexer_fuel=100_000,
    step_lexer_fuel=50_000,
    step_max_items=2_500,
    max_lexer_states=100_000,
    verbose_errors=False,
)
# What the library says when one of them is exhausted, and in a sentence for who has written the grammar.
EXHAUSTED = {
    r"too many expressions": f"takes more than {LIMITS.step_lexer_fuel:,} steps of the lexer for one token",
    r"too many states": f"needs more than {LIMITS.max_lexer_states:,} states of the lexer",
    r"Current row has (\d+) items": (r"has \1 alternatives at one place, of at most " f"{LIMITS.max_items_in_row:,}"),
    r"Too many items": f"takes more than {LIMITS.step_max_items:,} steps of the parser for one token",
}
NO_ANSWER, LEXER_FAULT = "NoExtension", "lexer error"
MAX_COMPILED, MAX_COMPILED_BYTES = 64, 8 << 20
LOWEST_PRIORITY = 19
# Prefixes of a session that have a matcher: more than a proposal is deep.
MAX_STATES = 96
# Grammars that sessions wait for at a time, beside those that are new.
NUM_FOLLOWING = 2

Bits = bytes
"""Bit v % 8 of byte v // 8, the lowest first, says whether token v may follow; whole words of 32 bits."""


def canonical(constraint: Constraint) -> str:
    """The one text of a constraint that every service compiles.

    Raises InvalidRequest about what is wrong without compiling.
    """
    constraint.check_len()
    try:
        match constraint.kind:
            case ConstraintKind.JSON_SCHEMA:
                space = constraint.whitespace
                defaults: Any = {"lenient": constraint.is_lenient, "whitespace_pattern": space or WHITESPACE}
                # A schema may say what it wants in `x-guidance`, unless the request says it.
                overrides: Any = {"whitespace_pattern": space} if space else {}
                return LLMatcher.grammar_from_json_schema(constraint.schema, defaults=defaults, overrides=overrides)
            case ConstraintKind.CHOICE:
                return grammar_from("choice", json.dumps(constraint.choices))
            case ConstraintKind.STRUCTURAL_TAG:
                tags = [
                    StructTag(trigger=each.trigger, begin=each.begin, grammar=each.schema, end=each.end)
                    for each in constraint.tags
                ]
                return LLMatcher.grammar_from_lark(StructTag.to_grammar(tags))
            case ConstraintKind.REGEX:
                return LLMatcher.grammar_from_regex(constraint.text)
            case ConstraintKind.LLGUIDANCE:
                return constraint.text
        return grammar_from("gbnf" if constraint.kind is ConstraintKind.GBNF else "lark", constraint.text)
    except ValueError as error:
        limit = f"a {constraint.kind} that can be read: {error}"
        raise InvalidRequest(constraint.field, constraint.text, limit) from None


class GrammarRefused(OutriderError):
    """The caller must change the grammar: it cannot be compiled, allows no answer, or is too much work to follow."""

    status = "INVALID_ARGUMENT"
    reason = "GRAMMAR_REFUSED"
    exit_code = 64


class Follower:
    """Follows one answer with a lexer of its own, token by token, each after its mask.

    Where the limits of the grammar are exhausted depends on its text and on the tokens before, then: neither on what
    others have asked for, nor on guesses, nor on where the answer was begun. Belongs to one thread at a time.
    """

    def __init__(self, compile_it: Callable[[], LLMatcher], num_bytes: int) -> None:
        """`compile_it` makes a matcher whose lexer is not shared; of a grammar that can be compiled."""
        self._compile = compile_it
        self._num_bytes = num_bytes
        self._matcher: LLMatcher
        self._token_ids: list[int]
        self._error: str | None
        """Complaint of the library about the last token, or about what may follow it; None while there is none."""
        self._is_off: bool
        """Whether the last token was not allowed."""
        self._masks: dict[int, tuple[Bits, bool]]
        """Masks by length of the output, with whether it may end there: the latest."""
        self._begin()

    def reach(self, output: Sequence[int]) -> int:
        """The length of the longest beginning of an output that something may follow; -1 where there is none."""
        known = self._token_ids
        if known[: len(output)] != list(output[: len(known)]) or (
            len(output) < len(known) and len(output) not in self._masks
        ):
            # The lexer has read what this answer has not, which has gone back: a fault of others, and rare.
            self._begin()
        for token_id in output[len(self._token_ids) :]:
            if self._error is not None:
                break
            self._token_ids.append(token_id)
            if self._matcher.consume_token(token_id):
                self._look()
            else:
                error = self._error = self._matcher.get_error()
                self._is_off = _limit_in(error) is None
        return min(len(output), len(self._token_ids) - (self._error is not None))

    def follows(self, output: Sequence[int]) -> bool:
        """Whether all tokens of an output are allowed, though perhaps nothing may follow the last."""
        reached = self.reach(output)
        return reached == len(output) or (reached == len(output) - 1 and not self._is_off)

    def allowed(self, output: Sequence[int], ends: Collection[int]) -> Bits:
        """Mask of the tokens after an output; empty after one that leaves the grammar or cannot go on."""
        if self.reach(output) < len(output):
            return bytes(self._num_bytes)
        return _with_ends(*self._masks[len(output)], ends)

    def exhausted(self, output: Sequence[int]) -> GrammarRefused | None:
        """Error of an output after which, or before, a limit of the grammar is exhausted."""
        limit = None if self.reach(output) == len(output) else _limit_in(self._error or "")
        if not limit:
            return None
        count = len(self._token_ids)
        return GrammarRefused(f"behind {count} token{'s' * (count != 1)} of the answer it {limit}")

    def _begin(self) -> None:
        self._matcher = self._compile()
        self._token_ids = []
        self._error, self._is_off = None, False
        self._masks = {}
        self._look()

    def _look(self) -> None:
        bits = self._matcher.compute_bitmask()[: self._num_bytes]
        # Of a matcher at fault the library's answer is an end of the text.
        error = self._matcher.get_error()
        number = int.from_bytes(bits, "little")
        if not error and number.bit_count() == 1:
            # A lexer that is exhausted may force a token that it would not; no mask of several comes from one.
            ahead = self._matcher.deep_copy()
            ahead.consume_token(number.bit_length() - 1)
            error = ahead.get_error() if LEXER_FAULT in ahead.get_error() else ""
        if error:
            self._error = error
            return
        length = len(self._token_ids)
        self._masks[length] = bits, self._matcher.is_accepting()
        self._masks.pop(length - MAX_STATES, None)


class Grammar:
    """A compiled grammar as one session uses it. Belongs to one thread at a time.

    Only one with a follower can be trusted with what is committed; guesses may find nothing where it finds something.
    """

    def __init__(self, text: str, pristine: LLMatcher, num_bytes: int, follower: Follower | None = None) -> None:
        self.text = text
        self.follower = follower
        self._num_bytes = num_bytes
        self._token_ids: list[int] = []
        # By length of prefix, the oldest first; the empty prefix always has one.
        self._states: dict[int, LLMatcher] = {0: pristine}
        self._guessed: dict[tuple[int, ...], Bits | None] = {}
        """Masks that were found last after each path."""

    def session(self, follower: Follower | None = None) -> "Grammar":
        """A grammar of the same text for another session, with a matcher of its own.

        The library lends one to no thread, not even for a copy, while another thread asks it what may follow.
        """
        return Grammar(self.text, self._states[0].deep_copy(), self._num_bytes, follower)

    @property
    def is_spent(self) -> bool:
        """Whether the lexer that all sessions share is of no more use, because one of them has exhausted it."""
        state = self._states[0].deep_copy()
        state.compute_bitmask()
        return state.is_error()

    @property
    def ignored_keywords(self) -> tuple[str, ...]:
        """Keywords of a lenient schema that are not enforced, such as `format color` or `not`."""
        found: set[str] = set()
        for warning in self._states[0].get_grammar_warnings():
            kind, _, rest = warning.partition(": ")
            if kind == "Unimplemented keys":
                found.update(json.loads(rest))
            else:
                found.add(f"format {rest}" if kind == "Unknown format" else kind.partition(" ")[0])
        return tuple(sorted(found))

    def allowed(
        self, output: Sequence[int], paths: Iterable[Sequence[int]], ends: Collection[int]
    ) -> list[Bits | None]:
        """Masks of the tokens after an output and each path after it; `ends` may where an answer may end.

        Nothing may follow an output that cannot go on. None stands for a path that no answer takes: what follows it is
        never asked for, because its own tokens may not follow what is before them. Where guesses have exhausted the
        lexer that they share, nothing may follow a path, though it may follow the same tokens once they are output.
        """
        states: dict[tuple[int, ...], LLMatcher | None] = {}
        self._guessed = {}
        found: list[Bits | None] = []
        for path in map(tuple, paths):
            if not path and self.follower is not None:
                found.append(self.follower.allowed(output, ends))
                continue
            if not states:
                states[()] = self._behind(output)
            root = states[()]
            if root is None or root.is_error():
                bits: Bits | None = bytes(self._num_bytes)
            else:
                state, bits = _along(states, path, ends), None
                if state is not None:
                    mask = state.compute_bitmask()[: self._num_bytes]
                    bits = bytes(self._num_bytes) if state.is_error() else _with_ends(mask, state.is_accepting(), ends)
            self._guessed[path] = bits
            found.append(bits)
        return found

    def confirmed(self, output: Sequence[int], path: Sequence[int], ends: Collection[int]) -> int:
        """Number of tokens of a path, one of `allowed`'s last call, that are followed by what plain decoding finds.

        The one after those is still committed, but nothing that was drawn after it.
        """
        if self.follower is None:
            return len(path)
        for length in range(1, len(path) + 1):
            if path[length - 1] in ends:
                break
            decided = self.follower.allowed([*output, *path[:length]], ends)
            if decided != self._guessed.get(tuple(path[:length])):
                return length - 1
        return len(path)

    def forced(self, output: Sequence[int]) -> list[int]:
        """The tokens that must follow an output, in the one spelling that is allowed; empty where there is a choice."""
        state = self._behind(output)
        if state is None or state.is_error() or state.is_stopped():
            return []
        return list(state.deep_copy().compute_ff_tokens())

    def _behind(self, output: Sequence[int]) -> LLMatcher | None:
        """Matcher after an output, None where that leaves the grammar."""
        known = self._token_ids
        if len(output) < len(known) or known != list(output[: len(known)]):
            length = next(
                each for each in reversed(self._states) if each <= len(output) and known[:each] == list(output[:each])
            )
            self._states = {each: state for each, state in self._states.items() if each <= length}
            del known[length:]
        state = self._states[len(known)]
        bulk = list(output[len(known) : -MAX_STATES])
        if bulk:
            state = state.deep_copy()
            known += bulk[: state.try_consume_tokens(bulk)]
            self._states[len(known)] = state
        for token_id in output[len(known) :]:
            state = state.deep_copy()
            if state.try_consume_tokens([token_id]) != 1:
                return None
            known.append(token_id)
            self._states[len(known)] = state
        for length in list(self._states)[1:-MAX_STATES]:
            del self._states[length]
        return state


def _with_ends(bits: Bits, may_end: bool, ends: Collection[int]) -> Bits:
    """A mask of the library's for a request with these ends."""
    changed = bytearray(bits)
    for token_id in ends:
        place, bit = token_id // 8, 1 << token_id % 8
        changed[place] = changed[place] | bit if may_end else changed[place] & ~bit
    return bytes(changed)


def _along(
    states: dict[tuple[int, ...], LLMatcher | None], path: tuple[int, ...], ends: Collection[int]
) -> LLMatcher | None:
    """Matcher after a path, found or made, at fault where its lexer is exhausted; None after an end and whatever
    else leaves the grammar.
    """
    if path not in states:
        above, token_id = _along(states, path[:-1], ends), path[-1]
        state = None if above is None or token_id in ends else above.deep_copy()
        if state is not None and not state.consume_token(token_id) and not _limit_in(state.get_error()):
            state = None
        states[path] = state
    return states[path]


def _limit_in(message: str) -> str | None:
    """Limit that is exhausted by what the library says, as the end of a sentence; None for another fault."""
    for pattern, words in EXHAUSTED.items():
        if found := re.search(pattern, message):
            return found.expand(words)
    return None


def is_end_only(bits: Bits, ends: Collection[int]) -> bool:
    """Whether nothing but an end may follow."""
    rest = bytearray(bits)
    for token_id in ends:
        rest[token_id // 8] &= ~(1 << token_id % 8)
    return not any(rest)


class GrammarEngine:
    """Compiles grammars for one vocabulary, and keeps those that were asked for last. May be used by several threads.

    Compiling takes up to some tens of milliseconds, without the interpreter's lock. It has threads that take the cores
    that no other thread wants: tokens that are under way do not wait for a grammar.
    """

    def __init__(self, tokenizer: str, vocabulary_size: int, end_ids: Collection[int]) -> None:
        """Takes the text of a tokenizer.json, and the model's ends; raises ValueError about what cannot be read."""
        self._tokenizer = LLTokenizer(tokenizer, n_vocab=vocabulary_size, eos_token=sorted(end_ids) or None)
        self._num_bytes = 4 * -(-vocabulary_size // 32)
        # Apart by salt, as cached prefixes are: how long an answer takes must not reveal what others have asked for.
        self._compiled: OrderedDict[tuple[bytes, str], Grammar] = OrderedDict()
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "grammars", initializer=_give_way)
        # A grammar that is known does not wait for new ones.
        self._followers = ThreadPoolExecutor(NUM_FOLLOWING, "followers", initializer=_give_way)

    def get(self, text: str, salt: bytes = b"") -> Grammar:
        """The grammar of a canonical text for a new session, compiled here and now; raises GrammarRefused."""
        found = self._known(text, salt)
        if found is None:
            found = self._compile(text)
            with self._lock:
                self._compiled[salt, text] = found.session()
                while (
                    len(self._compiled) > MAX_COMPILED
                    or sum(len(text) for _, text in self._compiled) > MAX_COMPILED_BYTES
                ):
                    self._compiled.popitem(last=False)
        return found

    async def compiled(self, text: str, salt: bytes = b"") -> Grammar:
        """Grammar that `get` finds, compiled on the engine's thread; cancelled before its turn, it is not compiled."""
        found = self._known(text, salt)
        if found is None:
            found = await asyncio.get_running_loop().run_in_executor(self._thread, self.get, text, salt)
        return found

    async def fault(self, text: str) -> str | None:
        """Why a canonical text is refused, None if it is not; nothing of it is remembered."""
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._compile, text)
        except GrammarRefused as error:
            return str(error)
        return None

    async def followed(self, text: str, salt: bytes, output: Sequence[int]) -> Grammar:
        """Grammar for a session that commits tokens: with a follower, which has read its output already."""
        found = await self.compiled(text, salt)
        return await asyncio.get_running_loop().run_in_executor(self._followers, self._follow, found, output)

    def _follow(self, grammar: Grammar, output: Sequence[int]) -> Grammar:
        follower = Follower(partial(self.matcher, grammar.text), self._num_bytes)
        follower.reach(output)
        return grammar.session(follower)

    def _known(self, text: str, salt: bytes) -> Grammar | None:
        """A grammar for a new session, where its text was compiled with that salt not long ago and is still of use."""
        with self._lock:
            found = self._compiled.get((salt, text))
            if found is None:
                return None
            if found.is_spent:
                del self._compiled[salt, text]
                return None
            self._compiled.move_to_end((salt, text))
            return found.session()

    def matcher(self, text: str) -> LLMatcher:
        """A matcher whose lexer is not shared."""
        return LLMatcher(self._tokenizer, text, log_level=0, limits=LIMITS)

    def _compile(self, text: str) -> Grammar:
        """Compiles up to what may come first."""
        found = matcher = self.matcher(text)
        # What one mask has cost counts for the next, so the first of a session may be one too many.
        for _ in range(2 if not matcher.is_error() else 0):
            found = matcher.deep_copy()
            is_empty = not any(found.compute_bitmask())
            if found.is_error() or is_empty:
                break
        else:
            if not matcher.is_error():
                return Grammar(text, matcher, self._num_bytes)
        error = found.get_error()
        if not error or NO_ANSWER in error:
            raise GrammarRefused("the grammar allows no answer")
        if limit := _limit_in(error):
            raise GrammarRefused(f"it {limit}")
        # The first line of what the library says, and what is wrong with a regular expression, which it says last.
        first, *others = error.strip().split("\n")
        fault = next((line.removeprefix("error:") for line in others if line.startswith("error:")), "")
        raise GrammarRefused((first + fault)[:300])


def _give_way() -> None:
    """Lets a core's other threads go first; only Linux knows threads by priority."""
    if sys.platform == "linux":
        # Where a sandbox forbids it, they go side by side: without this thread there would be no grammars.
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
