"""Log-probabilities of guesses: of the distribution drawn from, on request only, changing no guess."""

import math
from dataclasses import replace
from typing import Any

import pytest
from support.drafting.rules import logits_behind, ruled
from support.services.stepped_draft import PROMPT, SPEC, Draft

from draft_service.states import Wanted
from outrider.drafters.model_drafter import DRAFTERS, MODEL, SAMPLED, ModelDrafter, noise_of
from outrider.engine.batching import Feed
from outrider.engine.noise import Purpose
from outrider.engine.runner import ModelRunner
from outrider.engine.sampling.draft_distribution import quantise
from outrider.engine.sampling.draw import DrawInput, row_contexts
from outrider.engine.sampling.transforms import transform
from outrider.parameters import Rule, SessionSpec
from outrider.token_tree import TokenTree

TOP_N = 16
SERVED = [(name, rule) for name, rules in DRAFTERS.items() for rule in sorted(rules)]
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.0},
    {"temperature": 1.7, "top_k": 40, "top_p": 0.9},
    {"temperature": 0.6, "repetition_penalty": 1.3, "logit_bias": {7: 9.0, 9: -100.0}},
]
Wish = tuple[SessionSpec, str]


def proposals(runner: ModelRunner, *wishes: Wish) -> list[TokenTree]:
    """Five guesses of each of some sessions that share every forward."""
    draft = Draft(runner)
    draft.drafter = ModelDrafter(runner, draft.table.with_room, TOP_N)
    ids = [number.to_bytes(16, "big") for number in range(len(wishes))]
    for draft.session_id, (spec, drafter) in zip(ids, wishes, strict=True):
        fence = draft.fence(1, len(spec.token_ids))
        draft.sessions.open(fence, spec, Wanted(5, 0), draft.answers, drafter)
    found = {answer.fence.session_id: answer.content for answer in draft.run()}
    draft.table.clear()
    return [tree for session_id in ids if (tree := found[session_id]) is not None]


def asking(spec: SessionSpec) -> SessionSpec:
    """A copy of a request that also asks for log-probabilities."""
    return replace(spec, draft_logprobs=True)


def expected(runner: ModelRunner, spec: SessionSpec, drafter: str, guesses: tuple[int, ...]) -> list[float]:
    """Computed guess by guess from the model's logits, without the service."""
    logprobs = []
    for count, guess in enumerate(guesses):
        token_ids = [*spec.token_ids, *guesses[:count]]
        session = runner.open(token_ids, spec.prompt_len)
        contexts = row_contexts(DrawInput(Feed(session), spec))
        session.free()
        scores = transform(logits_behind(runner, token_ids), contexts, runner.vocabulary_size, runner.ops)
        prob = float(scores.double().softmax(dim=-1)[0, guess])
        if noise_of(drafter, spec.acceptance.rule) is Purpose.DRAFT:
            [distribution] = quantise(scores, TOP_N, runner.ops).distributions()
            prob = distribution.weights[distribution.token_ids.index(guess)] / sum(distribution.weights)
        logprobs.append(math.log(prob))
    return logprobs


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_each_is_that_of_the_distribution_that_the_guess_was_drawn_from(
    runner: ModelRunner, sampling: dict[str, Any]
) -> None:
    """Of every drafter under every rule it serves; guess and distribution are those of who does not ask."""
    edited = SPEC.sampling.model_copy(update=sampling)
    wishes = [(replace(ruled(SPEC, rule), seed=41 + n, sampling=edited), name) for n, (name, rule) in enumerate(SERVED)]
    silent = proposals(runner, *wishes)
    told = proposals(runner, *((asking(spec), drafter) for spec, drafter in wishes))
    assert [replace(tree, logprobs=()) for tree in told] == silent
    for (spec, drafter), tree in zip(wishes, told, strict=True):
        assert tree.logprobs == pytest.approx(expected(runner, spec, drafter, tree.token_ids), rel=1e-9, abs=1e-12)
        assert max(tree.logprobs) <= 0
        assert (set(tree.logprobs) == {0.0}) == (sampling["temperature"] == 0)


def test_only_who_asks_is_told(runner: ModelRunner) -> None:
    """Sessions of one forward, with either noise, report what they report alone, to the last bit."""
    specs = [replace(SPEC, token_ids=(*PROMPT, number), seed=number) for number in range(8)]
    wishes = [(asking(spec) if spec.seed % 2 else spec, (MODEL, SAMPLED)[spec.seed // 2 % 2]) for spec in specs]
    together = proposals(runner, *wishes)
    assert together == [tree for wish in wishes for tree in proposals(runner, wish)]
    assert [len(tree.logprobs) for tree in together] == [0, 5] * 4


@pytest.mark.parametrize("rule", [Rule.MATCH, Rule.RATIO])
def test_a_request_is_answered_again_with_the_same_numbers(draft: Draft, rule: Rule) -> None:
    """Repeated, and after a rollback; a session that only reads the prompt has none to report."""
    spec = asking(ruled(SPEC, rule))
    draft.open(spec, 0)
    [nothing] = draft.run()
    assert nothing.content == TokenTree()
    draft.open(spec, 4, epoch=2)
    [first] = draft.run()
    assert first.content is not None
    assert len(first.content.logprobs) == 4
    draft.open(spec, 4, epoch=2)
    assert draft.run() == [first]
    draft.sessions.rollback(draft.fence(3, len(PROMPT)))
    draft.advance(3, len(PROMPT), [], 4)
    [again] = draft.run()
    assert again.content == first.content
