"""What may follow under a grammar is a function of the tokens alone, for every row of every tree."""

import json
import queue
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from llguidance import LLMatcher
from support.stack import TARGET

from outrider import grammar as module
from outrider.constraint import MAX_CHOICES, Constraint, ConstraintKind
from outrider.errors import InvalidRequest
from outrider.grammar import (
    MAX_STATES,
    Bits,
    Follower,
    Grammar,
    GrammarEngine,
    GrammarRefused,
    canonical,
    is_end_only,
)

SIZE, END = 4096, 0
ENDS = frozenset({END})
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["king", "fox"]},
        "ages": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
        "next": {"$ref": "#"},
    },
    "required": ["name", "kind"],
    "additionalProperties": False,
}
CONSTRAINTS = {
    "schema": Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(SCHEMA)),
    "regex": Constraint(ConstraintKind.REGEX, r"([a-z]{2,6} ){2,5}(fox|wolf)[.!]"),
    "choice": Constraint(ConstraintKind.CHOICE, '["once", "once upon", "never"]'),
    "lark": Constraint(ConstraintKind.LARK, 'start: "(" (start | /[a-z]+/)* ")"'),
    "gbnf": Constraint(ConstraintKind.GBNF, 'root ::= ("the " [a-z]+ " ")+ "end"'),
    "tag": Constraint(
        ConstraintKind.STRUCTURAL_TAG,
        '{"structures": [{"begin": "<f=a>", "schema": {"type": "object"}, "end": "</f>"}], "triggers": ["<f="]}',
    ),
}
GRAMMARS = pytest.mark.parametrize("name", CONSTRAINTS)


@pytest.fixture(scope="module")
def tokenizer() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(Path(TARGET) / "tokenizer.json"))


@pytest.fixture(scope="module")
def engine(tokenizer: tokenizers.Tokenizer) -> GrammarEngine:
    return GrammarEngine(tokenizer.to_str(), SIZE, ENDS)


def ids_of(bits: Bits) -> list[int]:
    """The tokens that may follow."""
    return np.flatnonzero(np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")).tolist()


def follower(engine: GrammarEngine, constraint: Constraint) -> Follower:
    """What decides about one answer."""
    text = canonical(constraint)
    engine.get(text)
    return Follower(partial(engine.matcher, text), SIZE // 8)


def walk(grammar: Grammar, chance: random.Random, length: int) -> list[int]:
    """Random tokens that follow the grammar, up to its end."""
    tokens: list[int] = []
    while len(tokens) < length:
        [bits] = grammar.allowed(tokens, [()], ENDS)
        assert bits is not None
        legal = [each for each in ids_of(bits) if each != END]
        if not legal:
            break
        tokens.append(chance.choice(legal))
    return tokens


def random_tree(grammar: Grammar, output: Sequence[int], chance: random.Random) -> list[tuple[int, ...]]:
    """The paths of a tree, parents first: legal tokens mostly, and some that no grammar expects."""
    paths: list[tuple[int, ...]] = [()]
    for _ in range(chance.randrange(1, 12)):
        path = chance.choice(paths)
        [bits] = grammar.allowed(output, [path], ENDS)
        legal = ids_of(bits) if bits is not None else []
        token_id = chance.choice(legal) if legal and chance.random() < 0.8 else chance.randrange(SIZE)
        paths.append((*path, token_id))
    return paths


def fresh(engine: GrammarEngine, text: str, tokens: Sequence[int]) -> list[int] | None:
    """What may follow by a matcher that is fed nothing but these tokens; None where they leave the grammar."""
    matcher = LLMatcher(engine._tokenizer, text, log_level=0)
    if END in tokens or (tokens and not matcher.consume_tokens(list(tokens))):
        return None
    legal = ids_of(matcher.compute_bitmask()[: SIZE // 8])
    return sorted({*legal, END}) if matcher.is_accepting() else [each for each in legal if each != END]


def mismatches(engine: GrammarEngine, name: str, seeds: range) -> int:
    """Rows of random trees whose mask is not that of a fresh matcher."""
    text, found = canonical(CONSTRAINTS[name]), 0
    for seed in seeds:
        chance = random.Random(seed)
        grammar, pathfinder = engine.get(text), engine.get(text)
        output = walk(pathfinder, chance, chance.randrange(30))
        for _ in range(4):
            paths = random_tree(pathfinder, output, chance)
            for path, bits in zip(paths, grammar.allowed(output, paths, ENDS), strict=True):
                legal = None if bits is None else ids_of(bits)
                found += legal != fresh(engine, text, [*output, *path])
            # On, or back as after a rejection.
            output = walk(pathfinder, chance, len(output) + 2) if chance.random() < 0.5 else output[: len(output) // 2]
    return found


@pytest.mark.slow
@GRAMMARS
def test_masks_of_a_tree_are_those_of_fresh_matchers(engine: GrammarEngine, name: str) -> None:
    assert mismatches(engine, name, range(12)) == 0


def flat(along: Callable[..., LLMatcher | None]) -> Callable[..., LLMatcher | None]:
    """The bug of masks in flat order: each row follows the row before it, whatever its parent is."""

    def follow(states: dict[tuple[int, ...], LLMatcher | None], path: tuple[int, ...], ends: frozenset[int]) -> object:
        if path not in states:
            before, states[path] = next(reversed(states.values())), None
            if before is not None and path[-1] not in ends:
                state = before.deep_copy()
                states[path] = state if state.try_consume_tokens([path[-1]]) == 1 else None
        return states[path]

    return follow  # type: ignore[return-value]


def shared(along: Callable[..., LLMatcher | None]) -> Callable[..., LLMatcher | None]:
    """The bug of one matcher for all rows, which is rolled back after each; also after an end."""

    def follow(states: dict[tuple[int, ...], LLMatcher | None], path: tuple[int, ...], ends: frozenset[int]) -> object:
        root = states[()]
        assert root is not None
        consumed = root.try_consume_tokens(list(path))
        state = root.deep_copy()
        root.rollback(consumed)
        return state if consumed == len(path) else None

    return follow  # type: ignore[return-value]


@pytest.mark.slow
@pytest.mark.parametrize("bug", [flat, shared])
def test_planted_bugs_are_found(
    engine: GrammarEngine, monkeypatch: pytest.MonkeyPatch, bug: Callable[[object], object]
) -> None:
    monkeypatch.setattr(module, "_along", bug(module._along))
    assert sum(mismatches(engine, name, range(12)) for name in CONSTRAINTS) > 0


@GRAMMARS
def test_a_replay_at_every_token_allows_the_same(engine: GrammarEngine, name: str) -> None:
    """A service that is new to a session knows nothing but its tokens; one that knows it may have gone too far."""
    text = canonical(CONSTRAINTS[name])
    known = engine.get(text)
    output = walk(known, random.Random(3), 3 * MAX_STATES)
    for length in range(len(output), -1, -7):
        [again] = engine.get(text).allowed(output[:length], [()], ENDS)
        [before] = known.allowed(output[:length], [()], ENDS)
        assert again is not None
        assert before is not None
        assert ids_of(again) == ids_of(before)
        known.allowed(output, [()], ENDS)


def test_an_end_may_come_only_where_the_grammar_may_end(engine: GrammarEngine, tokenizer: tokenizers.Tokenizer) -> None:
    grammar = engine.get(canonical(CONSTRAINTS["choice"]))
    [once] = [tokenizer.encode(text, add_special_tokens=False).ids for text in ("once",)]
    [bits] = grammar.allowed(once, [()], ENDS)
    assert bits is not None
    assert END in ids_of(bits)
    assert not is_end_only(bits, ENDS)
    # A stop token of the request is an end as well, although the grammar knows it as text.
    [bits] = grammar.allowed([], [()], {END, once[0]})
    assert bits is not None
    assert not {END, once[0]} & set(ids_of(bits))
    whole = tokenizer.encode("never", add_special_tokens=False).ids
    [bits] = grammar.allowed(whole, [()], ENDS)
    assert bits is not None
    assert is_end_only(bits, ENDS)


def test_nothing_may_follow_what_has_left_the_grammar(engine: GrammarEngine) -> None:
    grammar = engine.get(canonical(CONSTRAINTS["regex"]))
    assert follower(engine, CONSTRAINTS["regex"]).follows([])
    assert not follower(engine, CONSTRAINTS["regex"]).follows([2])
    [bits] = grammar.allowed([2], [()], ENDS)
    assert bits is not None
    assert not any(bits)
    # After a guess that is not legal no mask is asked for.
    assert grammar.allowed([], [(2,), (END,)], ENDS) == [None, None]


def test_forced_tokens_are_the_only_legal_ones(engine: GrammarEngine) -> None:
    grammar, chance, num_forced = engine.get(canonical(CONSTRAINTS["schema"])), random.Random(1), 0
    for _ in range(200):
        output = walk(grammar, chance, chance.randrange(8))
        forced = grammar.forced(output)
        num_forced += len(forced)
        for place, token_id in enumerate(forced):
            [bits] = grammar.allowed([*output, *forced[:place]], [()], ENDS)
            assert bits is not None
            assert ids_of(bits) == [token_id]
    assert num_forced > 20


@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        (Constraint(ConstraintKind.JSON_SCHEMA, "{", "f"), "JSON"),
        (Constraint(ConstraintKind.JSON_SCHEMA, "[1]", "f"), "an object"),
        (Constraint(ConstraintKind.JSON_SCHEMA, "[" * 70 + "]" * 70, "f"), "nested at most 64 deep"),
        (Constraint(ConstraintKind.REGEX, "", "f"), "not empty"),
        (Constraint(ConstraintKind.REGEX, "a" * 9000, "f"), "at most 8192"),
        (Constraint(ConstraintKind.LARK, "a" * 300_000, "f"), "at most 262144"),
        (Constraint(ConstraintKind.CHOICE, '["a", ""]', "f"), "none of them empty"),
        (Constraint(ConstraintKind.CHOICE, json.dumps(["a"] * 1025), "f"), "at most 1024"),
        (Constraint(ConstraintKind.GBNF, 'root ::= "a', "f"), "a gbnf that can be read"),
        (Constraint(ConstraintKind.STRUCTURAL_TAG, "{}", "f"), "structures and triggers"),
        (
            Constraint(
                ConstraintKind.STRUCTURAL_TAG, '{"structures": [{"begin": "a", "end": ""}], "triggers": ["b"]}', "f"
            ),
            "begins with one of the triggers",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(constraint: Constraint, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as refused:
        canonical(constraint)
    assert refused.value.metadata["field"].startswith("f")


@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        (Constraint(ConstraintKind.REGEX, "(a"), "regex parse error"),
        (Constraint(ConstraintKind.REGEX, "x{200000}"), "it takes more than 50,000 steps of the lexer"),
        (Constraint(ConstraintKind.LARK, "start: A\nA: /a/ & /b/"), "allows no answer"),
        (Constraint(ConstraintKind.LARK, "start: foo"), "foo"),
        (Constraint(ConstraintKind.JSON_SCHEMA, '{"type": "object", "not": {}}'), "not"),
        (Constraint(ConstraintKind.JSON_SCHEMA, '{"type": "string", "minLength": 5, "maxLength": 3}'), "minLength"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_a_sentence(
    engine: GrammarEngine, constraint: Constraint, words: str
) -> None:
    with pytest.raises(GrammarRefused, match=words):
        engine.get(canonical(constraint))


def test_keywords_that_cannot_be_enforced_may_be_left_out(engine: GrammarEngine) -> None:
    lenient = Constraint(ConstraintKind.JSON_SCHEMA, '{"type": "object", "not": {}}', is_lenient=True)
    assert engine.get(canonical(lenient)).ignored_keywords == ("not",)


def test_white_space_is_bounded_unless_the_request_says_otherwise(
    engine: GrammarEngine, tokenizer: tokenizers.Tokenizer
) -> None:
    schema = '{"type": "array", "items": {"type": "integer"}}'
    usual = Constraint(ConstraintKind.JSON_SCHEMA, schema)
    strict = Constraint(ConstraintKind.JSON_SCHEMA, schema, whitespace="x")

    def fits(constraint: Constraint, text: str) -> bool:
        return follower(engine, constraint).follows(tokenizer.encode(text, add_special_tokens=False).ids)

    assert fits(usual, "[" + " " * 16 + "1")
    assert not fits(usual, "[" + " " * 17 + "1")
    assert not fits(strict, "[ 1")
    assert fits(strict, "[x1")


NESTED = Constraint(ConstraintKind.REGEX, "(a{0,100}){0,100}")


def exhausted_behind(one: Follower, tokens: Sequence[int]) -> int:
    """How many of many tokens there are before a limit is exhausted."""
    reached = one.reach(tokens)
    assert one.exhausted(tokens[:reached]) is None
    refused = one.exhausted(tokens[: reached + 1])
    assert (
        str(refused)
        == f"behind {reached + 1} tokens of the answer it takes more than 50,000 steps of the lexer for one token"
    )
    return reached


def test_where_a_grammar_is_exhausted_depends_on_the_answer_alone(
    engine: GrammarEngine, tokenizer: tokenizers.Tokenizer
) -> None:
    """Also one that has gone back, or has read its output at once, beside a session that has exhausted its own."""
    [a] = tokenizer.encode("a", add_special_tokens=False).ids
    tokens = [a] * 150
    ends = [exhausted_behind(follower(engine, NESTED), tokens) for _ in range(3)]
    assert len(set(ends)) == 1
    guessing = engine.get(canonical(NESTED))
    for length in range(ends[0] + 20):
        guessing.allowed(tokens[:length], [()], ENDS)
    assert guessing.is_spent
    slow = follower(engine, NESTED)
    for length in range(ends[0] + 1):
        assert any(slow.allowed(tokens[:length], ENDS))
        assert any(slow.allowed(tokens[: length // 2], ENDS))
    assert not any(slow.allowed(tokens[: ends[0] + 1], ENDS))
    assert exhausted_behind(slow, tokens) == ends[0]


def test_an_answer_that_goes_back_and_on_otherwise_ends_where_it_would_have(
    engine: GrammarEngine, tokenizer: tokenizers.Tokenizer
) -> None:
    """What it has read before is then no part of it."""
    mixed = Constraint(ConstraintKind.REGEX, "([a-c]{0,50}[b-d]{0,50}){0,50}")
    [a, b] = (tokenizer.encode(letter, add_special_tokens=False).ids[0] for letter in "ab")
    output, other = [a, b] * 100, [a, a, b] * 100
    expected = [exhausted_behind(follower(engine, mixed), tokens) for tokens in (output, other)]
    one = follower(engine, mixed)
    for start in (0, 10, 30, expected[0]):
        one.reach(output[:start])
        assert exhausted_behind(one, other) == expected[1]
        assert exhausted_behind(one, output) == expected[0]


def test_a_grammar_that_others_have_exhausted_is_compiled_anew(
    engine: GrammarEngine, tokenizer: tokenizers.Tokenizer
) -> None:
    """And sessions that still have it guess nothing after it, instead of anything."""
    [a] = tokenizer.encode("a", add_special_tokens=False).ids
    first, second = (engine.get(canonical(NESTED), b"spent") for _ in range(2))
    assert not engine.get(canonical(NESTED), b"spent").is_spent
    for length in range(150):
        first.allowed([a] * length, [()], ENDS)
    assert [bits is not None and any(bits) for bits in second.allowed([], [(), (a,), (a, a)], ENDS)] == [False] * 3
    [bits] = engine.get(canonical(NESTED), b"spent").allowed([a] * 5, [()], ENDS)
    assert bits is not None
    assert any(bits)


def test_sessions_ask_what_may_come_first_while_others_begin(engine: GrammarEngine) -> None:
    """Each in a thread of its own: the library lends no matcher to one thread while another one changes it."""
    text = canonical(CONSTRAINTS["schema"])
    begun: queue.SimpleQueue[Grammar | None] = queue.SimpleQueue()

    def begin() -> None:
        for _ in range(150):
            begun.put(engine.get(text))

    def ask() -> set[Bits | None]:
        return {grammar.allowed([], [()], ENDS)[0] for grammar in iter(begun.get, None)}

    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(ask) for _ in range(2)]
        try:
            for each in [threads.submit(begin) for _ in range(2)]:
                each.result()
        finally:
            for _ in asked:
                begun.put(None)
        assert len(asked[0].result() | asked[1].result()) == 1


@GRAMMARS
def test_a_follower_says_what_copies_say(engine: GrammarEngine, name: str) -> None:
    """Token by token, and all of a path that is about to be committed is confirmed up to its end."""
    text = canonical(CONSTRAINTS[name])
    for seed in range(6):
        output = walk(engine.get(text), random.Random(seed), 40)
        grammar = engine.get(text).session(follower(engine, CONSTRAINTS[name]))
        for length in range(0, len(output), 5):
            paths = [tuple(output[length : length + depth]) for depth in range(6)]
            found = grammar.allowed(output[:length], paths, ENDS)
            assert found == engine.get(text).allowed(output[:length], paths, ENDS)
            path = output[length : length + 5]
            assert grammar.confirmed(output[:length], path, ENDS) == len(path)
            assert grammar.confirmed(output[:length], [*path[:2], END], ENDS) == len([*path[:2], END])


def test_a_row_with_another_mask_than_in_plain_decoding_is_not_entered(
    engine: GrammarEngine, tokenizer: tokenizers.Tokenizer
) -> None:
    """Whatever the reason is: here the guesses' own lexer has been exhausted."""
    [a] = tokenizer.encode("a", add_special_tokens=False).ids
    for length in range(150):
        engine.get(canonical(NESTED), b"other").allowed([a] * length, [()], ENDS)
    spent = engine.get(canonical(NESTED), b"here")
    grammar = spent.session(follower(engine, NESTED))
    assert all(bits and any(bits) for bits in grammar.allowed([a], [(), (a,)], ENDS))
    assert grammar.confirmed([a], [a, a], ENDS) == 1
    for length in range(150):
        spent.allowed([a] * length, [()], ENDS)
    at_root, behind = grammar.allowed([a], [(), (a,)], ENDS)
    assert at_root is not None
    assert any(at_root)
    assert behind is not None
    assert not any(behind)
    assert grammar.confirmed([a], [a], ENDS) == 0


def test_remembered_grammars_are_bounded_by_their_text(engine: GrammarEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_COMPILED_BYTES", 3000)
    texts = [canonical(Constraint(ConstraintKind.LARK, f'start: "{letter * 1000}"')) for letter in "abcd"]
    for text in texts:
        engine.get(text, b"bounded")
    kept = [text for salt, text in engine._compiled if salt == b"bounded"]
    assert kept == texts[2:]


def test_grammars_that_are_asked_for_again_are_not_compiled_again(
    engine: GrammarEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And their sessions know nothing of each other."""
    text = canonical(CONSTRAINTS["schema"])
    first = engine.get(text)
    monkeypatch.setattr(module, "LLMatcher", None)
    second = engine.get(text)
    assert first.text == second.text
    output = walk(first, random.Random(5), 20)
    assert second._token_ids == []
    assert [bits is not None for bits in second.allowed(output, [()], ENDS)] == [True]


WORDS = [f"word {7919 * number % 100_003} of {number}" for number in range(MAX_CHOICES)]
WIDE = {
    "choice": Constraint(ConstraintKind.CHOICE, json.dumps(WORDS)),
    "enum": Constraint(ConstraintKind.JSON_SCHEMA, json.dumps({"enum": WORDS})),
    "any of": Constraint(ConstraintKind.JSON_SCHEMA, json.dumps({"anyOf": [{"const": word} for word in WORDS[:500]]})),
    "optional": Constraint(
        ConstraintKind.JSON_SCHEMA,
        json.dumps(
            {"type": "object", "properties": {word: {"type": "integer"} for word in WORDS[:200]}}
            | {"additionalProperties": False}
        ),
    ),
    "lark": Constraint(ConstraintKind.LARK, "start: " + " | ".join(map(json.dumps, WORDS[:500]))),
}


@pytest.mark.parametrize("name", WIDE)
def test_many_alternatives_stay_within_the_limits(engine: GrammarEngine, name: str) -> None:
    """Limits are for grammars that no client means: the longest choice, enum and the like can be answered."""
    grammar = engine.get(canonical(WIDE[name]))
    for seed in range(4):
        output = walk(grammar, random.Random(seed), 60)
        assert len(output) > 1
        assert follower(engine, WIDE[name]).follows(output)


def test_a_vocabulary_without_a_tokenizer_has_no_engine() -> None:
    """The library reads no tokenizer but those that keep bytes."""
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    with pytest.raises(ValueError, match=r"."):
        GrammarEngine(words.to_str(), 2, {0})
