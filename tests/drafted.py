"""Proposals as a draft service makes them, from any scores, for tests of a target that has no draft service."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outrider.engine.drawing import Ask, row_contexts
from outrider.engine.noise import Purpose, noise_key, round_key
from outrider.engine.quantise import quantise
from outrider.engine.runner import Feed, ModelRunner
from outrider.engine.sampling import transform
from outrider.engine.tree import TokenTree
from outrider.parameters import Acceptance, Rule, SessionSpec

RULES_WITH_LAWS = tuple(rule for rule in Rule if rule.needs_distributions)


def drafted(runner: ModelRunner, spec: SessionSpec, count: int, noise: float = 0.3, top_n: int = 32) -> TokenTree:
    """A chain behind the spec's tokens, from the runner's own logits with noise on them: most tokens are accepted.

    Drawn from its laws, and with them, where the spec's rule needs them, and else with the target's own noise.
    """
    dice = torch.Generator().manual_seed(spec.seed)
    token_ids, laws = list(spec.token_ids), []
    for _ in range(count):
        logits = logits_behind(runner, token_ids)
        logits = logits + noise * torch.randn(logits.shape, generator=dice)
        session = runner.open(token_ids, spec.prompt_len)
        [context] = row_contexts(Ask(Feed(session), spec))
        scores = transform(logits, [context], runner.vocabulary_size, runner.ops)
        if spec.acceptance.rule.needs_distributions:
            law = quantise(scores, top_n, runner.ops)
            key = round_key(spec.seed, len(spec.token_ids), len(token_ids), Purpose.DRAFT)
            token_ids += law.draw(torch.tensor([key])).tolist()
            laws += law.distributions()
        else:
            key = noise_key(spec.seed, len(token_ids), Purpose.TOKEN)
            token_ids += runner.ops.draw(scores, torch.tensor([key])).tolist()
    return TokenTree.chain(token_ids[len(spec.token_ids) :], laws)


def logits_behind(runner: ModelRunner, token_ids: list[int]) -> Tensor:
    """The one row of logits [1, V] behind these tokens."""
    session = runner.open(token_ids, 1)
    result = runner.forward([Feed(session)])
    session.free()
    return result.logits


def ruled(spec: SessionSpec, rule: Rule, **settings: float) -> SessionSpec:
    """The spec under another rule."""
    return replace(spec, acceptance=Acceptance(rule=rule, **settings))


def continued(spec: SessionSpec, token_ids: Sequence[int]) -> SessionSpec:
    """The spec with more committed tokens."""
    return replace(spec, token_ids=(*spec.token_ids, *token_ids))
