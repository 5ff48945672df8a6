"""A draft that verifies a cheaper guess proposes what it proposes alone, bit for bit, in fewer forwards."""

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from support.basics import check_empty, grid, spec_of
from support.drafting.cheaper_drafts import CASCADES, Oracle, cascade_of, plain_proposal, stopped, toy_cascade
from support.drafting.rules import ruled
from support.services.stepped_draft import PROMPT, SPEC, Draft, assert_like_fresh

from outrider.drafters.model_drafter import COUPLED, DRAFTERS, MODEL, SAMPLED
from outrider.drafters.shelf.cascade import model_cascade
from outrider.engine.runner import ModelRunner
from outrider.parameters import DraftDistribution, Rule, SamplingParameters

SERVED = [(name, rule) for name, rules in DRAFTERS.items() for rule in sorted(rules)]
GREEDY = spec_of(PROMPT, 60, seed=11, eos=())


@pytest.fixture(autouse=True)
def _empty(smaller: ModelRunner, twin: ModelRunner) -> Iterator[None]:
    yield
    check_empty(smaller.pool)
    check_empty(twin.pool)


@pytest.mark.slow
@pytest.mark.parametrize("logprobs", [True, *grid(False)], ids=["logprobs", ""])
@pytest.mark.parametrize(("drafter", "rule"), SERVED)
@pytest.mark.parametrize("cascade", CASCADES)
def test_proposals_are_those_of_the_draft_alone(
    runner: ModelRunner, smaller: ModelRunner, twin: ModelRunner, cascade: str, drafter: str, rule: Rule, logprobs: bool
) -> None:
    """Tokens, distributions and log-probabilities of several rounds, for every guesser, drafter and rule."""
    draft = Draft(runner, cascade=cascade_of(cascade, runner, smaller, twin))
    for sampling in ({"temperature": 0.0}, {"temperature": 0.9}, {"temperature": 1.3, "top_p": 0.9, "min_tokens": 9}):
        tokens = [*PROMPT]
        spec = replace(
            ruled(SPEC, rule),
            sampling=SamplingParameters(**sampling, repetition_penalty=1.1 if "top_p" in sampling else 1.0),
            draft_logprobs=logprobs,
        )
        draft.session_id = os.urandom(16)
        draft.open(spec, 8, drafter=drafter)
        for count in (7, 1, 3, 0, 5, 2):
            [answer] = draft.run()
            expected = plain_proposal(runner, replace(spec, token_ids=tuple(tokens)), len(answer.content), drafter)
            assert answer.content == expected
            # Some of what was proposed, and then something else.
            new = [*expected.token_ids[: count // 2], 40 + count]
            tokens += new
            draft.advance(1, len(tokens), new, count)
        draft.run()
        assert_like_fresh(draft)
    draft.table.clear()


@pytest.mark.parametrize("cascade", CASCADES)
def test_sixteen_at_once_propose_what_they_propose_alone(
    runner: ModelRunner, smaller: ModelRunner, twin: ModelRunner, cascade: str
) -> None:
    """Of every drafter and rule, with other seeds, temperatures and lengths, in shared forwards."""
    draft = Draft(runner, cascade=cascade_of(cascade, runner, smaller, twin))
    wishes = {}
    for number in range(16):
        drafter, rule = SERVED[number % len(SERVED)]
        sampling = SPEC.sampling.model_copy(update={"temperature": 0.3 * (number % 5)})
        spec = replace(ruled(SPEC, rule), token_ids=(*PROMPT, *range(number)), seed=number, sampling=sampling)
        draft.session_id = os.urandom(16)
        wishes[draft.session_id] = spec, 1 + number % 9, drafter
        draft.open(*wishes[draft.session_id][:2], drafter=drafter)
    found = {answer.fence.session_id: answer.content for answer in draft.run()}
    assert found == {session_id: plain_proposal(runner, *wish) for session_id, wish in wishes.items()}
    draft.table.clear()


@pytest.mark.slow
@pytest.mark.parametrize(("drafter", "rule"), [(COUPLED, Rule.MATCH), (SAMPLED, Rule.MATCH), (MODEL, Rule.BLOCK)])
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("cascade", CASCADES)
def test_a_storm_changes_no_proposal(
    runner: ModelRunner,
    smaller: ModelRunner,
    twin: ModelRunner,
    cascade: str,
    seed: int,
    drafter: str,
    rule: Rule,
) -> None:
    """Rollbacks, opens with newer epochs, repeats, overtaken requests, lost caches of both: as the draft alone."""
    chance, spec = random.Random(seed), ruled(replace(SPEC, seed=seed), rule)
    draft = Draft(runner, cascade=cascade_of(cascade, runner, smaller, twin))
    tokens, epoch, num_compared = [*PROMPT], 1, 0
    asked = {(epoch, len(tokens)): tuple(tokens)}

    def take() -> None:
        nonlocal num_compared
        for answer in draft.run():
            if answer.content:
                before = replace(spec, token_ids=asked[answer.fence.epoch, answer.fence.base_len])
                assert answer.content == plain_proposal(runner, before, len(answer.content), drafter)
                num_compared += 1

    draft.open(spec, 5, drafter=drafter)
    for _ in range(40):
        event, count = chance.randrange(7), chance.choice((0, 1, 4, 8))
        length = chance.randrange(len(PROMPT), len(tokens) + 1)
        new = [chance.randrange(1, 257) for _ in range(chance.randrange(1, 4))]
        if len(tokens) > 45:
            event = 0
        if chance.random() < 0.5:
            take()
        else:
            draft.step()
        if event == 0:
            epoch += 1
            draft.sessions.rollback(draft.fence(epoch, length))
            del tokens[length:]
            new = []
        elif event == 1:
            epoch += 1
            del tokens[length:]
        elif event == 2:
            draft.held.session.free()
        elif event == 3:
            assert draft.held.inner is not None
            draft.held.inner.free()
        elif event == 4:
            new = [*draft.held.session.token_ids[len(tokens) : len(tokens) + 2], *new]
        tokens += new
        asked[epoch, len(tokens)] = tuple(tokens)
        if event == 1:
            draft.open(replace(spec, token_ids=tuple(tokens)), count, epoch, drafter=drafter)
        else:
            draft.advance(epoch, len(tokens), new, count)
        if event == 5:
            draft.advance(epoch, len(tokens), new, count)
    take()
    assert num_compared > 12
    draft.table.clear()


@pytest.mark.parametrize("rule", [Rule.MATCH, Rule.RATIO])
@pytest.mark.parametrize(("wrong", "num_forwards"), [((), 1), (range(9), 9), ((4,), 2), ((0, 1, 2), 4)])
def test_right_guesses_save_forwards(runner: ModelRunner, rule: Rule, wrong: Sequence[int], num_forwards: int) -> None:
    """K = 9 takes one forward with an oracle, one more for each place at which it errs, and never more than alone."""
    draft = Draft(runner, cascade=toy_cascade(Oracle(runner, lambda place: place in wrong)))
    draft.open(ruled(SPEC, rule), 9)
    [answer] = draft.run()
    assert len(answer.content) == 9
    assert answer.times.forward_count == num_forwards
    assert draft.held.session.cached_len == len(PROMPT) + 8
    draft.table.clear()


@pytest.mark.slow
def test_forwards_are_what_the_law_says(runner: ModelRunner) -> None:
    """An oracle that errs by chance: K / E forwards a proposal, and at most one more."""
    dice = random.Random(5)
    for chance in (0.3, 0.6, 0.9):
        draft = Draft(runner, cascade=toy_cascade(Oracle(runner, lambda place, chance=chance: dice.random() > chance)))
        counts = []
        for seed in range(40):
            draft.session_id = os.urandom(16)
            draft.open(replace(SPEC, seed=seed), 8)
            [answer] = draft.run()
            counts.append(answer.times.forward_count)
        assert sum(counts) / len(counts) <= 8 / sum(chance**depth for depth in range(8)) + 1
        draft.table.clear()


@pytest.mark.parametrize(("drafter", "rule"), SERVED)
def test_a_model_with_the_same_noise_is_right_wherever_it_is_the_draft_s_equal(
    runner: ModelRunner, twin: ModelRunner, drafter: str, rule: Rule
) -> None:
    """One forward of the draft, whatever the noise; the cheaper one's forwards are none of the draft's."""
    draft = Draft(runner, cascade=model_cascade(twin, 64, clock=stopped))
    draft.open(ruled(SPEC, rule), 8, drafter=drafter)
    [answer] = draft.run()
    assert (len(answer.content), answer.times.forward_count) == (8, 1)
    draft.table.clear()
    # Its rows after a depth are then the draft's as well, drawn with the noise of the same round.
    draft = Draft(runner, cascade=model_cascade(twin, 64, 3, clock=stopped))
    draft.open(ruled(SPEC, rule), 8, drafter=drafter)
    [behind] = draft.run()
    assert behind.content == answer.content
    draft.table.clear()


@pytest.mark.slow
@pytest.mark.parametrize(("drafter", "rule"), SERVED)
@pytest.mark.parametrize("cascade", ["lookup", "smaller", "smaller+lookup"])
@pytest.mark.parametrize("depth", [1, 3])
def test_behind_a_depth_the_cheaper_one_proposes(
    runner: ModelRunner,
    smaller: ModelRunner,
    twin: ModelRunner,
    cascade: str,
    drafter: str,
    rule: Rule,
    depth: int,
) -> None:
    """The first rows are the draft's, the others, with their distributions, those of the smaller model."""
    text = (*PROMPT, *PROMPT[1:4])
    spec = replace(ruled(replace(SPEC, token_ids=text, prompt_len=len(text)), rule), draft_logprobs=True)
    draft = Draft(runner, cascade=cascade_of(cascade, runner, smaller, twin, depth))
    draft.open(spec, 8, drafter=drafter)
    [answer] = draft.run()
    tree, early = answer.content, plain_proposal(runner, spec, depth, drafter)
    assert len(tree) == len(tree.logprobs) == 8
    assert (tree.token_ids[:depth], tree.distributions[:depth]) == (early.token_ids, early.distributions)
    assert answer.times.compute_us > 0
    if cascade != "lookup":
        assert answer.times.forward_count <= depth
        with_guesses = replace(spec, token_ids=text + early.token_ids)
        late = plain_proposal(smaller, with_guesses, 8 - depth, drafter)
        if rule.needs_distributions:
            assert tree.distributions[depth] == late.distributions[0]
        # The noise of a draft of its own is that of the round, which began before these tokens.
        elif drafter != SAMPLED:
            assert tree.token_ids[depth:] == late.token_ids
            assert tree.logprobs[depth:] == late.logprobs
    # Asked again after a rollback, and opened again: the same rows.
    draft.sessions.rollback(draft.fence(2, len(text)))
    draft.advance(2, len(text), (), 8)
    [again] = draft.run()
    draft.open(spec, 8, epoch=3, drafter=drafter)
    [reopened] = draft.run()
    assert again.content == reopened.content == tree
    draft.advance(3, len(text) + 4, [*tree.token_ids[:3], 77], 2)
    [after] = draft.run()
    expected = plain_proposal(runner, replace(spec, token_ids=(*text, *tree.token_ids[:3], 77)), min(2, depth), drafter)
    assert after.content.token_ids[: len(expected)] == expected.token_ids
    draft.table.clear()


@pytest.mark.parametrize("rule", [Rule.MATCH, Rule.RATIO])
def test_a_text_s_own_rows_are_certain(
    runner: ModelRunner, smaller: ModelRunner, twin: ModelRunner, rule: Rule
) -> None:
    """What repeats is proposed as certain; where nothing repeats the draft draws, so that K stays K."""
    always_50 = SamplingParameters(temperature=1.0, logit_bias={50: 100.0})
    draft = Draft(runner, cascade=cascade_of("lookup", runner, smaller, twin, 1))
    for epoch, (last, expected) in enumerate([(7, (50, 60, 61, 62, 63)), (8, (50, 50, 50, 50, 50))], start=1):
        text = (7, 50, 60, 61, 62, 63, 64, last)
        spec = replace(ruled(SPEC, rule), token_ids=text, prompt_len=len(text), sampling=always_50)
        draft.open(spec, 5, epoch)
        [answer] = draft.run()
        assert answer.content.token_ids == expected
        assert answer.times.forward_count == (1 if last == 7 else 5)
        if rule.needs_distributions:
            laws = answer.content.distributions
            assert laws[0] == plain_proposal(runner, spec, 1).distributions[0]
            assert (laws[1] == DraftDistribution((60,), (1,))) == (last == 7)
    draft.table.clear()
