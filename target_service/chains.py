"""The rules `ratio`, `block` and `lenient` over many sessions: probabilities, laws and coins in, walks out.

The rules themselves are in target_service.rules. Knows no messages and commits nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from outrider.engine.noise import Purpose, first_uniforms, noise_key, round_key
from outrider.engine.runner import ModelRunner
from outrider.engine.sampling.draw import (
    Ask,
    before_collapse,
    draw_from,
    row_contexts,
    rows_of,
    scores_behind,
    undrawable,
)
from outrider.engine.sampling.transforms import transform
from outrider.errors import OutriderError
from outrider.parameters import Rule
from target_service.acceptance import Walk
from target_service.rules.block import block
from target_service.rules.lenient import lenient_greedy
from target_service.rules.outcome import Floats, Outcome
from target_service.rules.ratio import ratio


@dataclass(frozen=True, slots=True)
class Drafts:
    """Chains of one length K as the rules want them: ids and coins [B, K], laws [B, K, N] padded with weight 0."""

    token_ids: Tensor
    law_ids: Tensor
    law_weights: Tensor
    coins: Tensor

    @classmethod
    def of(cls, asks: Sequence[Ask], count: int) -> Self:
        """The first `count` draft tokens of each ask."""
        laws = [ask.feed.tree.distributions[:count] for ask in asks]
        width = max((len(law.token_ids) for chain in laws for law in chain), default=0)
        law_ids, law_weights = np.zeros((2, len(asks), count, width), dtype=np.int64)
        for number, chain in enumerate(laws):
            for place, law in enumerate(chain):
                law_ids[number, place, : len(law.token_ids)] = law.token_ids
                law_weights[number, place, : len(law.weights)] = law.weights
        token_ids = np.array([ask.feed.tree.token_ids[:count] for ask in asks], dtype=np.int64)
        arrays = token_ids, law_ids, law_weights, _coins(asks, count)
        return cls(*(torch.from_numpy(array) for array in arrays))


def decide_chains(
    runner: ModelRunner, asks: Sequence[Ask], logits: Tensor, ranges: Sequence[range]
) -> list[Walk | OutriderError]:
    """The walks of chains of one length under one rule; the rows of asks[i] are logits[ranges[i]].

    All at once; when that fails, each alone, to find those at fault.
    """
    try:
        scores = scores_behind(runner, rows_of(logits, ranges), [_asked(ask) for ask in asks])
        target_probs = runner.ops.softmax(scores)
    except ValueError:
        return [_decide_alone(runner, ask, rows_of(logits, [rows])) for ask, rows in zip(asks, ranges, strict=True)]
    return [*_walks(asks, target_probs.view(len(asks), -1, target_probs.shape[1]))]


def _decide_alone(runner: ModelRunner, ask: Ask, logits: Tensor) -> Walk | OutriderError:
    """One session's walk along the rows that can be drawn, up to the first that cannot.

    The chain is cut there behind its last token, never before it: dropped for what stands behind it, a token would be
    judged by more than its own probability.
    """
    rows: list[Tensor] = []
    for row, context in enumerate(row_contexts(_asked(ask))):
        try:
            scores = transform(logits[row : row + 1], [context], runner.vocabulary_size, runner.ops)
            rows.append(runner.ops.softmax(scores))
        except ValueError as error:
            if not row:
                return undrawable(len(context.committed), error)
            rows.append(torch.zeros_like(rows[0]))
            break
    return _walks([ask], torch.stack(rows, dim=1))[0]


def _walks(asks: Sequence[Ask], target_probs: Tensor) -> list[Walk]:
    """Walks along the first K tokens of each chain, for target_probs [B, K + 1, V]; of the last row all may be 0."""
    drafts = Drafts.of(asks, target_probs.shape[1] - 1)
    outcome = _outcome(asks[0], target_probs, drafts)
    counts = outcome.accepted_count.tolist()
    keys = np.array([_next_key(*each, drafts) for each in zip(asks, counts, strict=True)], dtype=np.int64)
    next_ids = draw_from(outcome.probs, torch.from_numpy(keys)).tolist()
    return [_walk(ask, *found) for ask, *found in zip(asks, counts, next_ids, strict=True)]


def _outcome(ask: Ask, target_probs: Tensor, drafts: Drafts) -> Outcome:
    """What the rule of this ask, which is that of all, says about the chains."""
    acceptance = ask.spec.acceptance
    laws = drafts.token_ids, drafts.law_ids, drafts.law_weights, drafts.coins
    if acceptance.rule is Rule.BLOCK:
        return block(target_probs, *laws)
    if acceptance.rule is Rule.RATIO:
        return ratio(target_probs, *laws)
    if ask.spec.sampling.temperature == 0:
        return lenient_greedy(target_probs, drafts.token_ids, acceptance.lenience)
    return ratio(target_probs, *laws, acceptance.lenience)


def _walk(ask: Ask, accepted_count: int, next_token_id: int) -> Walk:
    draft_count = len(ask.feed.tree)
    if next_token_id < 0:
        # Nothing can be drawn behind the last accepted token, so that its row is not entered; the next step says why.
        accepted_count -= 1
        next_token_id = ask.feed.tree.token_ids[accepted_count]
    rows = tuple(range(1, accepted_count + 1))
    return Walk(rows, next_token_id, accepted_count + (accepted_count < draft_count))


def _asked(ask: Ask) -> Ask:
    """The ask whose transforms give the probabilities that the rule looks at."""
    return before_collapse(ask) if ask.spec.acceptance.rule is Rule.LENIENT else ask


def _coins(asks: Sequence[Ask], count: int) -> Floats:
    keys = [
        round_key(ask.spec.seed, len(ask.feed.session), len(ask.feed.session) + place, Purpose.COIN)
        for ask in asks
        for place in range(count)
    ]
    return first_uniforms(keys).reshape(len(asks), count)


def _next_key(ask: Ask, accepted_count: int, drafts: Drafts) -> int:
    purpose = Purpose.TOKEN if accepted_count == drafts.token_ids.shape[1] else Purpose.RESIDUAL
    return noise_key(ask.spec.seed, len(ask.feed.session) + accepted_count, purpose)
