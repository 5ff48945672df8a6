"""Branches of a real model: each is bit for bit what the draft would propose if it were asked after its outcome.

So a target that begins a round with one verifies what it would have verified without run-ahead, with the same keys.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from support.basics import check_empty, spec_of
from support.drafting.rules import ruled
from support.models.engine_cases import fresh, kv_state
from support.models.tiny_models import write_tiny_model
from support.services.stepped_draft import CONTEXT_LEN, PROMPT, Draft

from draft_service.states import ModelState, Wanted
from outrider.drafters.model_drafter import COUPLED, MODEL, SAMPLED
from outrider.drafters.run_ahead import DrawnBranchingTask
from outrider.engine.branching import Branching
from outrider.engine.runner import ModelRunner
from outrider.parameters import Rule, SamplingParameters, SessionSpec
from outrider.rpc.messages.tree import MAX_BRANCHES_BYTES, branches_from, write_branches
from outrider.token_tree import Branch, TokenTree
from outrider.v1 import types_pb2

COUNT, BRANCHES = 3, 12
KINDS = [
    (Rule.MATCH, MODEL),
    (Rule.MATCH, COUPLED),
    (Rule.MATCH, SAMPLED),
    (Rule.RATIO, MODEL),
    (Rule.BLOCK, SAMPLED),
    (Rule.LENIENT, MODEL),
]
EVERY_KIND = pytest.mark.parametrize(("rule", "drafter"), KINDS, ids=str)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelRunner]:
    """A tiny model, whose pool is whole at the end."""
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny") / "model", "llama", context_len=CONTEXT_LEN)
    made = ModelRunner.load(str(folder), dtype="float32", kv_tokens=2048)
    yield made
    check_empty(made.pool)


def spec(rule: Rule, temperature: float = 1.0, seed: int = 5, max_len: int = 60) -> SessionSpec:
    made = ruled(spec_of(PROMPT, max_len, seed=seed, eos=(0,)), rule)
    return replace(made, sampling=SamplingParameters(temperature=temperature), draft_logprobs=True)


class Ahead:
    """A session of a draft that runs ahead; a round is the tokens that are committed, and what is found after them."""

    def __init__(self, runner: ModelRunner, wanted: SessionSpec, drafter: str) -> None:
        self.draft, self.spec, self.drafter = Draft(runner, prefix_cache=False), wanted, drafter
        self.tokens = list(wanted.token_ids)
        self.chain_forwards = 0
        self.draft.open(wanted, 0, drafter=drafter)
        self.draft.run()

    @property
    def held(self) -> ModelState:
        assert isinstance(self.draft.held, ModelState)
        return self.draft.held

    def round(
        self, token_ids: Sequence[int], count: int = COUNT, *, went_on: bool = False
    ) -> tuple[TokenTree, list[Branch]]:
        """The chain after some more tokens, and its branches."""
        self.tell(token_ids, count, went_on=went_on)
        return self.found()

    def tell(self, token_ids: Sequence[int], count: int = COUNT, *, went_on: bool = False) -> None:
        """Commits tokens and asks for a chain and branches, before anything is computed."""
        self.tokens += token_ids
        wanted = Wanted(count, 0, branch_count=BRANCHES, went_on=went_on)
        fence = self.draft.fence(1, len(self.tokens))
        self.draft.sessions.advance(fence, tuple(token_ids), wanted, self.draft.answers)

    def found(self) -> tuple[TokenTree, list[Branch]]:
        """The chain and its branches, where they were asked for."""
        answers = self.draft.run()
        self.chain_forwards = answers[0].times.forward_count
        chain, *rest = [answer.content for answer in answers]
        assert isinstance(chain, TokenTree)
        [branches] = rest or [[]]
        assert isinstance(branches, list)
        return chain, branches

    def asked(self, *token_ids: int, count: int = COUNT) -> TokenTree:
        """What a new session proposes after these tokens too, without branches."""
        alone = Draft(self.draft.runner, prefix_cache=False)
        known = replace(self.spec, token_ids=(*self.tokens, *token_ids))
        alone.open(known, count, drafter=self.drafter)
        tree = alone.tree()
        alone.table.clear()
        return tree

    def check(self, chain: TokenTree, branches: Sequence[Branch], count: int = COUNT) -> None:
        """The chain and each branch are what is proposed where nothing runs ahead."""
        assert replace(chain, logprobs=()) == replace(self.asked(count=count), logprobs=())
        for each in branches:
            expected = self.asked(*chain.token_ids[: each.accepted_count], each.next_token_id, count=count)
            assert (each.token_ids, each.distributions) == (expected.token_ids, expected.distributions)
            assert each.logprobs == pytest.approx(expected.logprobs, abs=1e-5)

    def close(self) -> None:
        self.draft.table.clear()


def outcome(chain: TokenTree, branch: Branch) -> tuple[int, ...]:
    """The tokens that a branch is for."""
    return (*chain.token_ids[: branch.accepted_count], branch.next_token_id)


@EVERY_KIND
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_a_branch_is_what_would_be_proposed_after_its_outcome(
    runner: ModelRunner, rule: Rule, drafter: str, temperature: float
) -> None:
    """Tokens and laws, round after round of hits, whether the draft was told that the target has gone on or not."""
    for seed in range(2):
        ahead = Ahead(runner, spec(rule, temperature, seed), drafter)
        found: tuple[TokenTree, list[Branch]] = ahead.round([7])
        for number in range(3):
            chain, branches = found
            # A chain that ends the request under match has fewer outcomes.
            assert BRANCHES >= len(branches) > (BRANCHES - 1 if rule.needs_distributions else 3)
            ahead.check(chain, branches)
            hit = branches[(5 * number + seed) % len(branches)]
            found = ahead.round(outcome(chain, hit), went_on=number % 2 == 0)
            assert found[0].token_ids == hit.token_ids
            assert ahead.chain_forwards == 0
        ahead.close()


@EVERY_KIND
def test_after_a_miss_everything_is_drawn_anew(runner: ModelRunner, rule: Rule, drafter: str) -> None:
    """Also where the target's own token is the very guess that it has refused, as block verification may have it."""
    ahead = Ahead(runner, spec(rule), drafter)
    chain, branches = ahead.round([7])
    taken = {outcome(chain, each) for each in branches}
    missed = next(token for token in range(1, 99) if (token,) not in taken and token != chain.token_ids[0])
    chain, branches = ahead.round([missed])
    ahead.check(chain, branches)
    chain, branches = ahead.round(chain.token_ids[:2])
    ahead.check(chain, branches)
    # Several rounds that the draft hears of at once.
    chain, branches = ahead.round([*outcome(chain, branches[0]), *branches[0].token_ids[:2]])
    ahead.check(chain, branches)
    ahead.close()


def test_after_a_plain_token_branches_are_for_what_follows_it(runner: ModelRunner) -> None:
    """Where the target has gone on without a branch, there is no chain under verification."""
    for rule in (Rule.MATCH, Rule.RATIO):
        ahead = Ahead(runner, spec(rule), MODEL)
        chain, branches = ahead.round([7])
        taken = {outcome(chain, each) for each in branches}
        missed = next(token for token in range(1, 99) if (token,) not in taken and token != chain.token_ids[0])
        chain, branches = ahead.round([missed], went_on=True)
        assert not chain
        assert {each.accepted_count for each in branches} == {0}
        ahead.check(ahead.asked(), branches)
        ahead.close()


@EVERY_KIND
@pytest.mark.parametrize("count", [1, 2, 5])
def test_another_number_of_guesses_is_made_after_a_hit(
    runner: ModelRunner, rule: Rule, drafter: str, count: int
) -> None:
    """Fewer of a branch, or more behind it, which are those that would be made without it."""
    ahead = Ahead(runner, spec(rule), drafter)
    chain, branches = ahead.round([7])
    for each in (4, 1):
        chain, branches = ahead.round(outcome(chain, branches[each]), count)
        assert len(chain) == count
        ahead.check(chain, branches, count)
    ahead.close()


@EVERY_KIND
def test_what_is_kept_of_a_tree_is_bitwise_that_of_a_fresh_session(
    runner: ModelRunner, rule: Rule, drafter: str
) -> None:
    """Committed tokens with their keys and values, and below them the rows of the branch."""
    ahead = Ahead(runner, spec(rule), drafter)
    chain, branches = ahead.round([7])
    for number in range(3):
        hit = branches[3 * number]
        ahead.tell(outcome(chain, hit))
        session = ahead.held.session
        assert session.cached_len == len(session)
        assert session.tree.token_ids[: len(hit.token_ids)] == hit.token_ids
        session_keys, session_values = kv_state(runner, session)
        _, keys, values = fresh(runner, ahead.tokens)
        assert session_keys.equal(keys)
        assert session_values.equal(values)
        chain, branches = ahead.found()
        ahead.check(chain, branches)
    ahead.close()


def test_chains_are_as_long_whatever_was_drawn(runner: ModelRunner) -> None:
    """Under a rule that tests with uniforms an end is a guess like another, in trunk and branches; under match not."""
    for rule, drafter in ((Rule.RATIO, MODEL), (Rule.MATCH, SAMPLED)):
        shorter = 0
        for seed in range(12):
            known = replace(spec(rule, seed=seed), eos_token_ids=frozenset(range(0, 300, 3)))
            ahead = Ahead(runner, known, drafter)
            chain, branches = ahead.round([7])
            ahead.check(chain, branches)
            assert all(each.next_token_id % 3 for each in branches)
            shorter += sum(len(each) < COUNT for each in (chain.token_ids, *(each.token_ids for each in branches)))
            ahead.close()
        assert (shorter > 0) == (rule is Rule.MATCH)


def test_branches_end_where_the_request_does(runner: ModelRunner) -> None:
    """The last token is the target's alone, whatever a branch stands on."""
    for max_len in range(len(PROMPT) + 2, len(PROMPT) + 9):
        ahead = Ahead(runner, spec(Rule.RATIO, max_len=max_len), MODEL)
        chain, branches = ahead.round([7])
        room = max_len - 1 - len(ahead.tokens)
        assert len(chain) == min(COUNT, room)
        for each in branches:
            assert len(each.token_ids) == min(COUNT, room - each.accepted_count - 1)
        assert bool(branches) == (room > 1)
        ahead.check(chain, branches)
        ahead.close()


def test_branches_drawn_with_the_keys_of_the_round_before_are_found(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault: they would be what the coins of that round have looked at."""
    monkeypatch.setattr(Branching, "base_depth", lambda _self, _number: 0)
    ahead = Ahead(runner, spec(Rule.BLOCK), MODEL)
    with pytest.raises(AssertionError):
        ahead.check(*ahead.round([7]))
    ahead.close()


def test_a_refused_guess_that_is_proposed_again_is_found(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: after a token that is the trunk's, the trunk goes on."""
    monkeypatch.setattr(DrawnBranchingTask, "can_go_on_from", lambda _self, _number: True)
    ahead = Ahead(runner, spec(Rule.BLOCK), MODEL)
    chain, _ = ahead.round([7])
    with pytest.raises(AssertionError):
        ahead.check(*ahead.round(chain.token_ids[:1]))
    ahead.close()


def test_branches_that_are_too_large_for_a_message_are_left_out(runner: ModelRunner) -> None:
    """The likeliest come first, and what is sent is read as it was."""
    ahead = Ahead(runner, spec(Rule.RATIO), MODEL)
    _, branches = ahead.round([7])
    message = types_pb2.Branches()
    write_branches(message, branches)
    assert branches_from(message, 300, 32) == [approximately(each) for each in branches]
    assert 100 * COUNT * BRANCHES < message.ByteSize() < 450 * COUNT * BRANCHES
    many = types_pb2.Branches()
    write_branches(many, branches * 50)
    assert MAX_BRANCHES_BYTES - 2000 < many.ByteSize() <= MAX_BRANCHES_BYTES + 4 * len(many.branches)
    ahead.close()


def approximately(branch: Branch) -> Any:
    """A branch as it travels, with log-probabilities of 32 bits."""
    message = types_pb2.Branches()
    write_branches(message, [branch])
    return branch._replace(logprobs=tuple(message.branches[0].logprobs))
