"""Drafters that guess from probes: exact under every rule, and their guesses know nothing of their own round."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from support.basics import check_empty, grid, spec_of
from support.drafting.rules import ruled
from support.drafting.toy_drafters import oracle
from support.models.tiny_models import write_tiny_model
from support.services.stepped_target import PROMPT, VOCABULARY_SIZE, OwnTarget, assert_like_fresh, plain, storm

from outrider.drafters.drafter import Drafter, GuessLimits
from outrider.drafters.shelf.probing import (
    LOOKAHEAD,
    PASS,
    Finder,
    Lookahead,
    PassChain,
    ProbeDraft,
    ProbeDrafter,
    ProbeRows,
    embed_probes,
)
from outrider.engine.runner import ModelRunner
from outrider.errors import InvalidRequest
from outrider.parameters import DraftDistribution, Rule, SessionSpec
from outrider.rpc.fencing import Fence
from outrider.token_tree import EMPTY, TokenTree

GREEDY = spec_of(PROMPT, 90, seed=3, eos=())
SAMPLED = spec_of(PROMPT, 90, seed=3, eos=(), temperature=1.0)
# Few tokens are likely, so that some are found again.
COLD = spec_of(PROMPT, 90, seed=3, eos=(), temperature=1.0, top_k=2)


@pytest.fixture(scope="module")
def probe_ids(runner: ModelRunner) -> range:
    return embed_probes(runner, torch.randn(4, 48, generator=torch.Generator().manual_seed(2)))


def lookahead(runner: ModelRunner) -> Drafter:
    """With eleven probes."""
    return ProbeDrafter(runner, LOOKAHEAD, partial(Lookahead, window=4, depth=4))


def proposals_of(own: OwnTarget, spec: SessionSpec, counts: Sequence[int]) -> list[TokenTree]:
    """What the session proposes in steps that ask for so many guesses; it is opened with the first."""
    own.ask(spec, counts[0])
    answers = own.run()
    for count in counts[1:]:
        own.go_on(count)
        answers += own.run()
    return [answer.content.hosted.tree for answer in answers]


@pytest.mark.slow
@pytest.mark.parametrize("spec", [GREEDY, SAMPLED, COLD], ids=["greedy", "sampled", "cold"])
@pytest.mark.parametrize("count", [1, 6])
@pytest.mark.parametrize("budget", [0, 40])
@pytest.mark.parametrize("drafter", [LOOKAHEAD, PASS])
def test_tokens_are_those_of_plain_decoding(
    runner: ModelRunner, probe_ids: range, spec: SessionSpec, count: int, budget: int, drafter: str
) -> None:
    """Asked and unasked, whatever is guessed; and nothing is left in the cache."""
    hosting = lookahead(runner) if drafter == LOOKAHEAD else ProbeDrafter(runner, PASS, partial(PassChain, probe_ids))
    own = OwnTarget(runner, hosting)
    answers = own.to_the_end(spec, count, budget)
    assert own.tokens == plain(runner, spec)
    trees = [answer.content.hosted.tree for answer in answers]
    assert sum(map(bool, trees)) > 10
    assert max(map(len, trees)) <= count
    assert drafter == PASS or spec is SAMPLED or any(answer.content.accepted_rows for answer in answers)
    assert_like_fresh(own)
    own.table.clear()
    check_empty(runner.pool)


class Knowing(PassChain):
    """Finds after every probe what plain decoding says there."""

    def __init__(self, probe_ids: Sequence[int], tokens: Sequence[int]) -> None:
        super().__init__(probe_ids)
        self._guesses = oracle(tokens)

    def learn(self, token_ids: Sequence[int]) -> None:
        super().learn(list(self._guesses(GREEDY, range(self._base_len + 1), len(token_ids))))


@pytest.mark.parametrize(("count", "sizes"), [(4, [1, 5, 1, 5, 1]), (3, [1, 4, 2, 4, 2]), (2, [1, 3, 3, 3, 3])])
def test_right_guesses_of_probes_are_all_kept(
    runner: ModelRunner, probe_ids: range, count: int, sizes: list[int]
) -> None:
    """Four probes find as many tokens, of which the round after theirs has those that theirs has not committed."""
    tokens = plain(runner, GREEDY)
    own = OwnTarget(runner, ProbeDrafter(runner, PASS, partial(Knowing, probe_ids, tokens)))
    answers = own.to_the_end(GREEDY, count)
    assert own.tokens == tokens
    assert [len(answer.content.token_ids) for answer in answers][:5] == sizes
    own.table.clear()


@pytest.mark.slow
@pytest.mark.parametrize("rule", [Rule.MATCH, Rule.RATIO, Rule.BLOCK, Rule.LENIENT, Rule.TYPICAL])
@pytest.mark.parametrize("seed", [0, *grid(1, 2)])
def test_the_same_steps_make_the_same_proposals(runner: ModelRunner, rule: Rule, seed: int) -> None:
    """A storm and its repetition: every proposal is a function of what each step has committed before it.

    The second finds its prompts in the prefix cache, and its rows beside those of others. Under match, and by nothing
    but the rule, tokens are plain decoding's; rules that test with distributions get chains of certain guesses.
    """
    spec, told = ruled(replace(COLD, seed=seed), rule), []
    for has_neighbour in (False, True):
        own = OwnTarget(runner, lookahead(runner))
        if has_neighbour:
            session_id, own.session_id = own.session_id, b"neighbour".ljust(16)
            own.open(replace(SAMPLED, max_len=600), budget=500)
            own.session_id = session_id
        told.append((*storm(own, spec, random.Random(seed)), own.tokens))
        own.table.clear()
    assert told[0] == told[1]
    _, proposals, tokens = told[0]
    assert len(proposals) > 5
    if rule is Rule.MATCH:
        assert tokens == plain(runner, spec)
    for _, tree in proposals:
        laws = tuple(DraftDistribution((token_id,), (1,)) for token_id in tree.token_ids)
        assert tree.distributions == (laws if rule.needs_distributions else ())
        assert tree.is_chain or not rule.needs_distributions


def test_what_a_round_draws_has_no_part_in_what_its_probes_find(runner: ModelRunner) -> None:
    """Eight seeds draw several tokens after the same ones, and all have found the same n-grams."""
    drawn, found = set(), []
    for seed in range(8):
        own = OwnTarget(runner, lookahead(runner))
        own.ask(replace(SAMPLED, token_ids=(*PROMPT, 9, 9), seed=seed), 3)
        own.run()
        assert own.held.hosted is not None
        assert isinstance(own.held.hosted.part, ProbeDraft)
        finder = own.held.hosted.part.learn()
        found.append([finder.candidates([token_id]) for token_id in range(VOCABULARY_SIZE)])
        drawn.add(own.tokens[-1])
        own.table.clear()
    assert len(drawn) > 3
    assert all(each == found[0] for each in found)
    assert sum(map(len, found[0])) == 4


def going_back(runner: ModelRunner) -> tuple[list[TokenTree], list[TokenTree]]:
    """Proposals of a session that has gone back, and of a fresh one after the same tokens."""
    own, fresh = OwnTarget(runner, lookahead(runner)), OwnTarget(runner, lookahead(runner))
    try:
        proposals_of(own, GREEDY, [4] * 20)
        own.sessions.rollback(Fence(own.session_id, 2, 12))
        back = []
        for _ in range(12):
            own.go_on(4, epoch=2)
            back += [answer.content.hosted.tree for answer in own.run()]
        spec = replace(GREEDY, token_ids=plain(runner, GREEDY)[:12])
        return back, proposals_of(fresh, spec, [4] * 12)
    finally:
        own.table.clear()
        fresh.table.clear()


def test_who_goes_back_forgets_what_was_found(runner: ModelRunner) -> None:
    """The same noise is drawn with once more, and what was found may know it; a fresh session's guesses do not."""
    back, fresh = going_back(runner)
    assert back == fresh
    assert back[0] == EMPTY
    assert any(back)


def test_who_remembers_is_found(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, with what was found kept."""
    monkeypatch.setattr(ProbeDraft, "truncate", lambda draft, length: None)
    back, fresh = going_back(runner)
    assert back != fresh


@pytest.mark.parametrize(("context_len", "kv_tokens", "max_rows"), [(64, 64, 512), (640, 640, 10), (64, 4096, 512)])
def test_without_room_for_probes_tokens_are_plain_s(
    tmp_path: Path, context_len: int, kv_tokens: int, max_rows: int
) -> None:
    """A request that fills the cache, or the context, to the last token; and forwards with fewer rows."""
    folder = write_tiny_model(tmp_path / "model", "llama", vocab_size=VOCABULARY_SIZE, context_len=context_len)
    runner = ModelRunner.load(str(folder), dtype="float32", kv_tokens=kv_tokens)
    spec = replace(GREEDY, max_len=64)
    tokens = plain(runner, spec)
    runner.max_rows = max_rows
    own = OwnTarget(runner, lookahead(runner))
    answers = own.to_the_end(spec, 4, 30)
    assert own.tokens == tokens
    assert any(answer.content.hosted.tree for answer in answers) == (max_rows > 10)
    own.table.clear()
    check_empty(runner.pool)


def test_rows_are_computed_only_where_guesses_are_asked_for(runner: ModelRunner) -> None:
    """A plain stretch has no probes; eleven come with the prompt and with each proposal, and none at the very end."""
    own = OwnTarget(runner, lookahead(runner))
    own.ask(GREEDY, 3)
    [answer] = own.run()
    assert answer.times.row_count == len(PROMPT) + 11
    rows = []
    for count in (3, 0, 0, 3):
        own.go_on(count)
        [answer] = own.run()
        rows.append(answer.times.row_count - len(answer.content.hosted.tree))
    assert rows == [12, 1, 1, 12]
    own.table.clear()


def paths(tree: TokenTree) -> list[list[int]]:
    """The tokens that each row stands on, its own last."""
    return [[tree.token_ids[row - 1] for row in tree.path(number)] for number in range(1, len(tree) + 1)]


def test_the_window_is_that_of_the_paper() -> None:
    """Row 0 of the window is a chain; column i of the rows below stands on row 0 up to i, and on its own column."""
    finder = Lookahead(window=3, depth=4)
    # Columns begin with parts of the text: 10 20 30, 30 40 50, 50 60 10.
    tree = finder.probes([10, 20, 30, 40, 50, 60])
    chain, firsts = [30, 50], {0: [20, 30], 1: [40, 50], 2: [60, 10]}
    expected = [chain[:1], chain]
    for column, rest in firsts.items():
        expected += [[*chain[:column], *rest[:1]], [*chain[:column], *rest]]
    assert paths(tree) == expected
    finder.learn([1, 2, 3, 4, 5, 6, 7, 8])
    # 60 was known, and what it had then been followed by is the first column's.
    assert finder.candidates([1, 60]) == [(20, 30, 4)]
    assert finder.candidates([30]) == [(40, 50, 6)]
    assert finder.candidates([50]) == [(60, 10, 8)]
    assert finder.candidates([10]) == []
    # All columns have moved by one.
    assert paths(finder.probes([10, 20, 30, 40, 50, 60, 70])) == [
        *([40], [40, 60]),
        *([30], [30, 4]),
        *([40, 50], [40, 50, 6]),
        *([40, 60, 10], [40, 60, 10, 8]),
    ]


def test_a_first_token_keeps_its_newest_n_grams() -> None:
    """At most G; one that is found again is as good as new."""
    finder = Lookahead(window=1, depth=3, num_guesses=2)
    for last in (7, 8, 7, 9):
        finder.probes([1])
        finder._columns = [(1, 5)]
        finder.learn([last])
    assert finder.candidates([1]) == [(5, 9), (5, 7)]


def test_guesses_of_a_chain_go_on_behind_what_they_found() -> None:
    """All are used after one token, the rest after tokens that were found, and none after others."""
    chain = PassChain((300, 301, 302))
    assert chain.candidates([1, 2]) == []
    assert chain.probes([1, 2]) == TokenTree.chain((300, 301, 302))
    chain.learn([4, 5, 6])
    assert chain.candidates([1, 2, 3]) == [[4, 5, 6]]
    assert chain.candidates([1, 2, 3, 4]) == [[5, 6]]
    assert chain.candidates([1, 2, 9, 4, 5]) == [[6]]
    for other in ([1, 2, 3, 5], [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7]):
        assert chain.candidates(other) == []


class Fixed(Lookahead):
    """Always has the same candidates."""

    def candidates(self, token_ids: Sequence[int]) -> Sequence[Sequence[int]]:
        return [(1, 2, 3), (1, 2, 4), (5, 1)]


@pytest.mark.parametrize("rule", Rule)
def test_candidates_become_a_tree_or_a_chain(runner: ModelRunner, rule: Rule) -> None:
    """Beginnings in common are one row, and there are K rows; a rule that needs distributions has the best alone."""
    session = runner.open(PROMPT, 5)
    make: Callable[[], Finder] = Fixed
    draft = ProbeDraft(replace(ruled(SAMPLED, rule), draft_logprobs=True), make, ProbeRows.in_forwards_of(runner))
    expected = {9: ((1, 2, 3, 4, 5, 1), (0, 1, 2, 2, 0, 5)), 5: ((1, 2, 3, 4, 5), (0, 1, 2, 2, 0))}
    expected |= {4: ((1, 2, 3, 4), (0, 1, 2, 2)), 2: ((1, 2), (0, 1))}
    for count, (token_ids, parents) in expected.items():
        draft.propose(session, GuessLimits(count))
        assert draft.proposal is not None
        tree = draft.proposal.tree
        end = 3 if rule.needs_distributions else count
        assert (tree.token_ids, tree.parents) == (token_ids[:end], parents[:end])
        assert tree.logprobs == (0.0,) * len(tree)
    draft.propose(session, GuessLimits(0))
    assert draft.proposal is not None
    assert draft.proposal.tree == EMPTY


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ((0, 4, 4), "lookahead.window is 0, but must be at least 1"),
        ((4, 2, 4), "lookahead.depth is 2, but must be at least 3"),
        ((4, 4, 0), "lookahead.guesses is 0, but must be at least 1"),
    ],
)
def test_windows_without_a_meaning_are_refused(sizes: tuple[int, int, int], sentence: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Lookahead(*sizes)
    assert caught.value.message == sentence
