"""A draft that was trained with mask tokens: all guesses of one forward, as its publisher's code would find them."""

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.basics import check_empty, spec_of
from support.drafting.rules import ruled
from support.models.engine_cases import kv_state
from support.models.tiny_models import write_tiny_model
from support.services.stepped_draft import CONTEXT_LEN, PROMPT, Draft, assert_like_fresh
from support.services.stepped_target import OwnTarget, check_pure, plain, storm
from support.stack import reference_model

from draft_service.states import Wanted
from outrider.drafters import masked
from outrider.drafters.hosted import HostedModel
from outrider.drafters.masked import PARD, drafters_of
from outrider.drafters.model_drafter import COUPLED, DRAFTERS, MODEL, SAMPLED, Step, guess_each
from outrider.drafters.shelf.cascade import text_cascade
from outrider.engine.runner import ModelRunner
from outrider.errors import InvalidRequest, ModelRefused
from outrider.parameters import Rule, SamplingParameters, SessionSpec
from outrider.token_tree import TokenTree, TreeShape

MASK = 255
KINDS = [(rule, temperature) for rule in Rule for temperature in (0.0, 0.7, 1.0)]
EVERY_KIND = pytest.mark.parametrize(("rule", "temperature"), KINDS)
SHAPES = [
    TreeShape(),
    TreeShape(max_depth=3, max_children=2),
    TreeShape(expansions=(2, 1, 2)),
    TreeShape(is_static=True, max_depth=4),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    keys = {"pard_token": MASK, "spd_type": "pard"}
    place = tmp_path_factory.mktemp("pard") / "model"
    return write_tiny_model(place, "qwen3", vocab_size=257, context_len=CONTEXT_LEN, **keys)


@pytest.fixture(scope="module")
def runner(folder: Path) -> Iterator[ModelRunner]:
    """The draft, whose pool is whole at the end."""
    made = ModelRunner.load(str(folder), dtype="float32", kv_tokens=2048)
    yield made
    check_empty(made.pool)


def spec(
    rule: Rule = Rule.MATCH, temperature: float = 1.0, tokens: Sequence[int] = PROMPT, **sampling: Any
) -> SessionSpec:
    made = ruled(spec_of(tokens, 60, seed=5, eos=(0,)), rule)
    return replace(made, sampling=SamplingParameters(temperature=temperature, **sampling), draft_logprobs=True)


def proposed(
    runner: ModelRunner, wanted: SessionSpec, count: int, shape: TreeShape | None = None, drafter: str = PARD
) -> TokenTree:
    """What a new session proposes, in one forward."""
    draft = Draft(runner, prefix_cache=False)
    draft.open(wanted, count, shape=shape, drafter=drafter)
    [answer] = draft.run()
    draft.table.clear()
    assert answer.times.forward_count == 1 or drafter != PARD
    return answer.content


def laws(folder: Path, tokens: Sequence[int], count: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The laws [K, V] of guesses as the publisher computes them: transformers, in float64."""
    with torch.no_grad():
        ids = torch.tensor([[*tokens, *[MASK] * (count - 1)]])
        logits = reference_model(folder).double()(ids).logits[0, -count:]
    return logits.softmax(dim=-1).numpy()


@pytest.mark.parametrize("tokens", [PROMPT, (6, *PROMPT[1:]), (*PROMPT[:-1], 91), PROMPT[:1]])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_each_guess_has_the_law_of_its_publishers_code(
    runner: ModelRunner, folder: Path, tokens: Sequence[int], count: int
) -> None:
    """With another first token and another last one, too: no row is left out, and none is one place off."""
    found = proposed(runner, spec(Rule.RATIO, tokens=tokens), count)
    expected = laws(folder, tokens, count)
    assert len(found) == count
    for law, distribution, logprob, token_id in zip(
        expected, found.distributions, found.logprobs, found.token_ids, strict=True
    ):
        own = law[list(distribution.token_ids)]
        weights = np.array(distribution.weights)
        np.testing.assert_allclose(weights / weights.sum(), own / own.sum(), atol=5e-5)
        assert np.exp(logprob) == pytest.approx(law[token_id] / own.sum(), abs=5e-5)
    greedy = proposed(runner, spec(temperature=0.0, tokens=tokens), count)
    ends = [place for place, token_id in enumerate(expected.argmax(axis=1)) if token_id == 0]
    assert list(greedy.token_ids) == expected.argmax(axis=1).tolist()[: ends[0] + 1 if ends else count]


@EVERY_KIND
def test_more_guesses_begin_with_fewer(runner: ModelRunner, rule: Rule, temperature: float) -> None:
    """Tokens, distributions and log-probabilities; also where penalties look at the guesses before."""
    for sampling in ({}, {"repetition_penalty": 1.5, "frequency_penalty": 0.8, "min_tokens": 9}):
        most = proposed(runner, spec(rule, temperature, **sampling), 8)
        for count in range(1, 8):
            fewer = proposed(runner, spec(rule, temperature, **sampling), count)
            kept = min(count, len(most))
            assert fewer.token_ids == most.token_ids[:kept]
            assert fewer.distributions == most.distributions[:kept]
            assert fewer.logprobs == most.logprobs[:kept]


def test_the_first_guess_is_that_of_the_chain(runner: ModelRunner) -> None:
    """The same key, the same law; later ones have laws of their own."""
    for rule, temperature in KINDS:
        wanted = spec(rule, temperature)
        own, chain = proposed(runner, wanted, 6), proposed(runner, wanted, 6, drafter=MODEL)
        assert (own.token_ids[0], own.distributions[:1]) == (chain.token_ids[0], chain.distributions[:1])
        assert own.token_ids != chain.token_ids


def test_penalties_hold_among_the_guesses(runner: ModelRunner) -> None:
    """No guess comes twice where a penalty forbids that, and a banned word is not guessed across two rows."""
    wanted = spec(temperature=0.0, frequency_penalty=2.0, presence_penalty=2.0, repetition_penalty=2.0)
    free, penalised = (proposed(runner, each, 8).token_ids for each in (spec(temperature=0.0), wanted))
    assert len(set(penalised)) == len(penalised) == 8
    banned = replace(spec(temperature=0.0), banned=(free[:2],))
    assert proposed(runner, banned, 8).token_ids[:2] != free[:2]
    assert proposed(runner, banned, 8).token_ids[0] == free[0]


@pytest.mark.parametrize("shape", SHAPES)
@EVERY_KIND
def test_a_tree_takes_one_forward(runner: ModelRunner, rule: Rule, temperature: float, shape: TreeShape) -> None:
    """Where the rule shares noise its first children are the chain; it has no more rows and depth than is asked for."""
    wanted = spec(rule, temperature)
    tree = proposed(runner, wanted, 9, shape)
    chain = proposed(runner, wanted, 9)
    assert 3 <= len(tree) <= 9
    assert max(tree.depths) <= (shape.max_depth or len(shape.expansions) or 8)
    assert bool(tree.distributions) == rule.needs_distributions
    if not rule.needs_distributions:
        row = 0
        for token_id in chain.token_ids[: max(tree.depths)]:
            children = [tree.token_ids[child - 1] for child in tree.children(row)]
            if not children:
                break
            assert children[0] == token_id
            row = tree.children(row)[0]
    single = proposed(runner, wanted, 5, TreeShape(max_children=1, max_depth=5))
    assert single.is_chain


@EVERY_KIND
def test_sessions_together_propose_what_they_propose_alone(runner: ModelRunner, rule: Rule, temperature: float) -> None:
    """Chains and trees of masks beside chains of steps, of other lengths, with a cascade beside them."""
    draft = Draft(runner, cascade=text_cascade())
    wishes = {}
    for number in range(16):
        drafter = (PARD, MODEL, PARD, SAMPLED)[number % 4]
        shape = TreeShape() if number % 3 == 0 else None
        wanted = replace(spec(rule, temperature, tokens=(*PROMPT, *range(1, 1 + number))), seed=number)
        draft.session_id = os.urandom(16)
        wishes[draft.session_id] = wanted, 1 + number % 7, shape, drafter
        draft.open(wanted, 1 + number % 7, shape=shape, drafter=drafter)
    found = {answer.fence.session_id: answer.content for answer in draft.run()}
    draft.table.clear()
    assert found == {session_id: proposed(runner, *wish) for session_id, wish in wishes.items()}


@pytest.mark.parametrize("shape", [None, TreeShape()], ids=["chain", "tree"])
@pytest.mark.parametrize("rule", [Rule.MATCH, Rule.RATIO])
def test_a_proposal_is_a_function_of_its_tokens(runner: ModelRunner, rule: Rule, shape: TreeShape | None) -> None:
    """After rollbacks, new epochs, lost caches, overtaken requests and answers with the mask itself in them.

    What is cached is what a prefill computes, so no row of a mask has stayed.
    """
    dice, draft = random.Random(7), Draft(runner)
    tokens, epoch = list(PROMPT), 1
    draft.open(spec(rule), 3, shape=shape, drafter=PARD)
    for _ in range(60):
        [answer] = draft.run()
        known = replace(spec(rule, tokens=tuple(tokens)), prompt_len=len(PROMPT))
        if shape is None or rule is Rule.RATIO:
            # The values of a tree follow what was learnt of it; chains and drawn trees are the tokens' alone.
            assert answer.content == proposed(runner, known, max(len(answer.content), 1), shape)
        assert_like_fresh(draft)
        assert not draft.held.session.tree
        event, count = dice.randrange(5), dice.choice((1, 2, 5))
        right = list(answer.content.token_ids[: dice.randrange(3)]) if answer.content.is_chain else []
        new = [*right, dice.choice((MASK, 40, 41))]
        if len(tokens) + len(new) + 8 > CONTEXT_LEN:
            epoch, tokens = epoch + 1, list(PROMPT)
            draft.open(spec(rule), count, epoch=epoch, shape=shape, drafter=PARD)
            continue
        if event == 0:
            epoch += 1
            del tokens[dice.randrange(len(PROMPT), len(tokens) + 1) :]
            draft.sessions.rollback(draft.fence(epoch, len(tokens)))
            new = []
        elif event == 1:
            draft.held.session.free()
        elif event == 2:
            # Asked and overtaken, before anything or after a step.
            tokens += new
            draft.advance(epoch, len(tokens), new, count, shape)
            if dice.random() < 0.5:
                draft.step()
                draft.answers.clear()
            else:
                draft.answers.clear()
            new = [42]
        tokens += new
        draft.advance(epoch, len(tokens), new, count, shape)
        if event == 2:
            draft.device.run(draft.steps.advance)
            draft.answers[:] = draft.answers[-1:]
    draft.table.clear()


def test_masks_are_written_into_no_block_of_another_session(runner: ModelRunner) -> None:
    """Two sessions share the blocks of a prompt that ends at their edge; what one has of it stays as it was."""
    tokens = tuple(range(1, 1 + 2 * runner.pool.block_size))
    draft = Draft(runner)
    wanted = replace(spec(tokens=tokens), cache_salt=b"shared")
    draft.open(wanted, 0)
    draft.run()
    first = draft.held
    before = kv_state(runner, first.session)
    draft.session_id = os.urandom(16)
    draft.open(replace(wanted, token_ids=tokens[:-3], prompt_len=len(tokens) - 3), 8, drafter=PARD)
    [answer] = draft.run()
    assert len(answer.content) == 8
    assert all(torch.equal(*pair) for pair in zip(before, kv_state(runner, first.session), strict=True))
    draft.table.clear()


def test_a_long_prompt_is_read_in_pieces_before_the_masks(folder: Path) -> None:
    """Its proposal is that of a prompt that is read at once."""
    runner = ModelRunner.load(str(folder), dtype="float32", kv_tokens=1024)
    wanted = spec(Rule.RATIO, tokens=tuple(range(1, 50)))
    expected = proposed(runner, wanted, 6)
    runner.max_rows = 16
    draft = Draft(runner, prefix_cache=False)
    draft.open(wanted, 6, drafter=PARD)
    [answer] = draft.run()
    draft.table.clear()
    assert (answer.content, answer.times.forward_count > 1) == (expected, True)


def test_a_step_that_failed_is_made_again(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its forward and the first draws; then every session proposes what it would have."""
    draft, calls = Draft(runner), list[int]()
    wishes = {os.urandom(16): spec(tokens=(*PROMPT, number)) for number in (7, 8)}

    def failing(*arguments: Any) -> list[Step]:
        calls.append(len(calls))
        if len(calls) == 3:
            raise RuntimeError("planted")
        return guess_each(*arguments)

    monkeypatch.setattr(masked, "guess_each", failing)
    for draft.session_id, wanted in wishes.items():
        draft.open(wanted, 5, drafter=PARD)
    with pytest.raises(RuntimeError, match="planted"):
        draft.step()
    found = {answer.fence.session_id: answer.content for answer in draft.run()}
    draft.table.clear()
    assert found == {session_id: proposed(runner, wanted, 5) for session_id, wanted in wishes.items()}


def test_it_makes_no_branches(runner: ModelRunner) -> None:
    """They would be chains of steps, which it does not propose afterwards."""
    draft = Draft(runner)
    draft.open(spec(), 3, drafter=PARD)
    draft.run()
    with pytest.raises(InvalidRequest, match=r"advance\.branch_count"):
        draft.sessions.advance(draft.fence(1, 6), (9,), Wanted(3, 0, branch_count=4), draft.answers)
    draft.table.clear()


@pytest.mark.parametrize("shape", [None, TreeShape(max_depth=4)], ids=["chain", "tree"])
@pytest.mark.parametrize("rule", [Rule.MATCH, Rule.RATIO])
def test_a_target_hosts_it(runner: ModelRunner, tmp_path: Path, rule: Rule, shape: TreeShape | None) -> None:
    """After all that can happen to a session its proposals are a function, and under `match` its tokens are plain."""
    place = write_tiny_model(tmp_path / "target", "llama", vocab_size=257, context_len=CONTEXT_LEN)
    target = ModelRunner.load(str(place), dtype="float32", kv_tokens=2048)
    own, wanted = OwnTarget(target, HostedModel(runner), shape), replace(spec(rule), eos_token_ids=frozenset())
    said, proposals = storm(own, wanted, random.Random(3))
    assert len(proposals) > 3
    if rule is Rule.MATCH:
        tokens = plain(target, wanted)
        assert all(each == tokens[: len(each)] for each in said)
    if shape is None:
        check_pure(target, HostedModel(runner), wanted, proposals)
        before, tree = proposals[-1]
        assert tree == proposed(runner, replace(wanted, token_ids=tuple(before)), len(tree))
    own.table.clear()
    check_empty(target.pool)


def test_a_model_with_masks_offers_them_first(runner: ModelRunner, folder: Path) -> None:
    """Before its chains, but behind them where a cascade speeds those up; a model without masks offers none."""
    assert list(drafters_of(runner.config)) == [PARD, MODEL, COUPLED, SAMPLED]
    assert list(drafters_of(runner.config, has_cascade=True)) == [MODEL, COUPLED, SAMPLED, PARD]
    assert drafters_of(replace(runner.config, masks=None)) is DRAFTERS


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"pard_token": 257}, '"pard_token" is 257, but must be an integer from 0 to 256'),
        ({"pard_token": -1}, '"pard_token" is -1, but must be an integer from 0 to 256'),
        ({"pard_token": "255"}, "\"pard_token\" is '255', but must be an integer"),
        ({"spd_type": "pard"}, '"pard_token" is missing'),
    ],
)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_mask_that_no_model_could_read_is_refused(
    tmp_path: Path, family: str, keys: dict[str, object], words: str
) -> None:
    """By its key, before anything is loaded; in a model of transformers', too."""
    place = write_tiny_model(tmp_path / "model", family, vocab_size=257, **keys)
    with pytest.raises(ModelRefused) as caught:
        ModelRunner.load(str(place))
    assert words in caught.value.message
