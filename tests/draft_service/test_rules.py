"""Guesses under each rule: their noise, the distributions that come with them, the length of chains."""

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.basics import spec_of
from support.drafting.rules import RULES_WITH_LAWS, drafted, ruled
from support.services.stepped_draft import PROMPT, SPEC, Draft, continued, fresh_guesses
from typer.testing import CliRunner

from draft_service.__main__ import app
from draft_service.states import Wanted
from outrider.drafters import model_drafter
from outrider.drafters.model_drafter import DRAFTERS, MODEL, SAMPLED, ModelDrafter
from outrider.engine.batching import Feed
from outrider.engine.runner import ForwardResult, ModelRunner
from outrider.parameters import DraftDistribution, Rule, SessionSpec
from outrider.token_tree import TokenTree

GREEDY = spec_of(PROMPT, 60, seed=11, eos=())
LAWLESS = (Rule.MATCH, Rule.TYPICAL)
SERVED = [(name, rule) for name, rules in DRAFTERS.items() for rule in sorted(rules)]


def proposal_of(runner: ModelRunner, spec: SessionSpec, count: int, drafter: str = MODEL, top_n: int = 32) -> TokenTree:
    """What a new session proposes."""
    draft = Draft(runner)
    draft.drafter = ModelDrafter(runner, draft.table.with_room, top_n)
    open_with(draft, spec, count, drafter)
    [answer] = draft.run()
    draft.table.clear()
    assert answer.content is not None
    return answer.content


def open_with(draft: Draft, spec: SessionSpec, count: int, drafter: str) -> None:
    fence = draft.fence(1, len(spec.token_ids))
    draft.sessions.open(fence, spec, Wanted(count, 0), draft.answers, drafter)


@pytest.mark.parametrize("rule", RULES_WITH_LAWS)
def test_each_guess_comes_with_the_distribution_that_it_was_drawn_from(runner: ModelRunner, rule: Rule) -> None:
    """As computed here from the model's logits, without the service."""
    spec = ruled(SPEC, rule)
    proposal = proposal_of(runner, spec, 5)
    assert proposal == drafted(runner, spec, 5, noise=0.0)
    assert proposal.is_chain
    assert all(
        token in distribution.token_ids
        for token, distribution in zip(proposal.token_ids, proposal.distributions, strict=True)
    )


@pytest.mark.parametrize("rule", LAWLESS)
def test_without_a_need_for_distributions_guesses_are_the_target_s_own_draws(runner: ModelRunner, rule: Rule) -> None:
    """Coupled by default, and by name; a sampled draft sends no distribution either, and guesses otherwise."""
    coupled = fresh_guesses(runner, SPEC, 8)
    for drafter in ("model", "coupled"):
        assert proposal_of(runner, ruled(SPEC, rule), 8, drafter) == TokenTree.chain(coupled)
    sampled = proposal_of(runner, ruled(SPEC, rule), 8, SAMPLED)
    assert sampled == TokenTree.chain(proposal_of(runner, ruled(SPEC, Rule.RATIO), 8).token_ids)
    assert sampled.token_ids != coupled


def test_greedy_guesses_are_the_same_under_every_rule(runner: ModelRunner) -> None:
    """At temperature 0 a distribution is one token."""
    expected = fresh_guesses(runner, GREEDY, 6)
    for drafter, rules in DRAFTERS.items():
        for rule in rules:
            proposal = proposal_of(runner, ruled(GREEDY, rule), 6, drafter)
            assert proposal.token_ids == expected
            if rule.needs_distributions:
                assert proposal.distributions == tuple(DraftDistribution((token,), (65535,)) for token in expected)


@pytest.mark.parametrize("top_n", [1, 3, 32])
def test_a_distribution_has_at_most_top_n_tokens(runner: ModelRunner, top_n: int) -> None:
    """And not fewer, where the model has more."""
    distributions = proposal_of(runner, ruled(SPEC, Rule.RATIO), 5, top_n=top_n).distributions
    assert max(len(distribution.token_ids) for distribution in distributions) == top_n


def test_another_round_is_drawn_with_other_noise(runner: ModelRunner) -> None:
    """The same position after the same tokens, in a round that begins later, is drawn anew."""
    spec = replace(ruled(SPEC, Rule.RATIO), sampling=SPEC.sampling.model_copy(update={"temperature": 2.0}))
    first = proposal_of(runner, spec, 8)
    later = proposal_of(runner, ruled(replace(spec, token_ids=(*spec.token_ids, first.token_ids[0])), Rule.RATIO), 7)
    assert later.distributions[0] == first.distributions[1]
    assert later.token_ids != first.token_ids[1:]
    coupled = fresh_guesses(runner, SPEC, 8)
    assert fresh_guesses(runner, continued(SPEC, coupled[:1]), 7) == coupled[1:]


@pytest.mark.parametrize(("drafter", "rule"), SERVED)
def test_only_a_chain_without_distributions_stops_at_an_end(runner: ModelRunner, drafter: str, rule: Rule) -> None:
    """Where uniforms decide its length must not depend on what was drawn: guesses go on as if there were no end."""
    free = proposal_of(runner, ruled(SPEC, rule), 8, drafter)
    stop = free.token_ids[3]
    ending = replace(ruled(SPEC, rule), stop_token_ids=frozenset({stop}))
    found = proposal_of(runner, ending, 8, drafter)
    count = 8 if rule.needs_distributions else free.token_ids.index(stop) + 1
    assert found.token_ids == free.token_ids[:count]


@pytest.mark.parametrize("fault", [math.nan, -math.inf, math.inf])
def test_a_row_that_cannot_be_drawn_is_a_guess_of_id_0(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, fault: float
) -> None:
    """The chain is as long as any other, under cuts that look at probabilities too; its neighbour is as ever."""
    spec = replace(ruled(SPEC, Rule.BLOCK), sampling=SPEC.sampling.model_copy(update={"top_p": 0.9}))
    other = replace(spec, token_ids=(*PROMPT[:4], 91))
    expected = [proposal_of(runner, each, 4) for each in (spec, other)]
    forward = runner.forward

    def spoiled(feeds: Sequence[Feed], *others: Any) -> ForwardResult:
        result = forward(feeds, *others)
        for feed, rows in zip(feeds, result.ranges, strict=True):
            if rows is not None and len(feed.session) == 7 and feed.session.token_ids[4] == 90:
                result.logits[rows.start] = fault
        return result

    monkeypatch.setattr(runner, "forward", spoiled)
    found = proposals_together(runner, [(spec, 4, MODEL), (other, 4, MODEL)])
    assert found[1] == expected[1]
    assert found[0].token_ids[:2] == expected[0].token_ids[:2]
    assert found[0].distributions[2] == DraftDistribution((0,), (65535,))
    assert (found[0].token_ids[2], len(found[0])) == (0, 4)


Wish = tuple[SessionSpec, int, str]


def proposals_together(runner: ModelRunner, wishes: Sequence[Wish]) -> list[TokenTree]:
    """The proposals of sessions that share every forward."""
    draft = Draft(runner)
    draft.drafter = ModelDrafter(runner, draft.table.with_room, top_n=32)
    ids = [os.urandom(16) for _ in wishes]
    for draft.session_id, (spec, count, drafter) in zip(ids, wishes, strict=True):
        open_with(draft, spec, count, drafter)
    found = {answer.fence.session_id: answer.content for answer in draft.run()}
    draft.table.clear()
    return [tree for session_id in ids if (tree := found[session_id]) is not None]


def test_drafters_share_forwards_and_guess_what_they_guess_alone(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every drafter, rule, other temperatures and counts: tokens and distributions as alone, in one forward."""
    wishes = [
        (
            replace(
                ruled(SPEC, rule),
                token_ids=(*PROMPT, number),
                seed=number,
                sampling=SPEC.sampling.model_copy(update={"temperature": 0.2 * (number % 6)}),
            ),
            1 + number % 5,
            drafter,
        )
        for number, (drafter, rule) in enumerate(SERVED)
    ]
    alone = [proposal_of(runner, *wish) for wish in wishes]
    sizes = []
    guess_each = model_drafter.guess_each

    def counted(runner: ModelRunner, tasks: Sequence[object], *rest: object) -> object:
        sizes.append(len(tasks))
        return guess_each(runner, tasks, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(model_drafter, "guess_each", counted)
    assert proposals_together(runner, wishes) == alone
    assert proposals_together(runner, wishes[::-1]) == alone[::-1]
    assert len(sizes) == 2 * 5
    assert sizes[0] == len(wishes)


@pytest.mark.parametrize("rule", RULES_WITH_LAWS)
def test_a_request_is_answered_again_with_the_same_distributions(draft: Draft, rule: Rule) -> None:
    """Repeated, after a rollback, and opened again: the round's noise is the round's own."""
    spec = ruled(SPEC, rule)
    draft.open(spec, 4)
    [first] = draft.run()
    draft.open(spec, 4)
    assert draft.run() == [first]
    draft.sessions.rollback(draft.fence(2, 5))
    draft.advance(2, 5, [], 4)
    [again] = draft.run()
    assert again.content == first.content
    draft.open(spec, 4, epoch=3)
    [reopened] = draft.run()
    assert reopened.content == first.content


def test_an_overtaken_request_sends_the_distributions_of_its_guesses(draft: Draft) -> None:
    """As many as there are tokens."""
    draft.open(ruled(SPEC, Rule.RATIO), 6)
    draft.step()
    draft.step()
    draft.advance(1, 6, [9], 2)
    first, second = draft.run()
    for answer in (first, second):
        assert answer.content is not None
        assert (len(answer.content), len(answer.content.distributions)) == (2, 2)


@pytest.mark.parametrize("top_n", ["0", "257"])
def test_the_size_of_distributions_has_a_range(tmp_path: Path, top_n: str) -> None:
    """Flag and variable; before a model is looked for."""
    for arguments, variables in ((["--top-n", top_n], {}), ([], {"OUTRIDER_TOP_N": top_n})):
        result = CliRunner().invoke(app, ["--model", str(tmp_path), *arguments], env=variables)
        assert str(result.exception) == f"--top-n is {top_n}, but must be in [1, 256]"


def test_distributions_do_not_depend_on_threads(folder: Path, runner: ModelRunner) -> None:
    """Nor do their draws."""
    threads = torch.get_num_threads()
    expected = proposal_of(runner, ruled(SPEC, Rule.RATIO), 6)
    more = ModelRunner.load(str(folder), dtype="float32", kv_tokens=2048, num_threads=3)
    torch.set_num_threads(1 if threads > 1 else 2)
    found = proposal_of(more, ruled(SPEC, Rule.RATIO), 6)
    torch.set_num_threads(threads)
    assert found == expected
