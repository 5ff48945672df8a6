"""What the target does with the logits of a step: each session's rule, many sessions at once.

The rules themselves are pure functions in the files beside this one; here they get their probabilities, distributions
and uniforms, and give walks. An empty proposal is plain decoding under every rule. A session that cannot be served
fails alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from outrider.engine.noise import Purpose, first_uniforms, noise_key, round_key
from outrider.engine.runner import ModelRunner
from outrider.engine.sampling.draw import (
    DrawInput,
    Drawn,
    before_argmax,
    draw_each,
    draw_from,
    row_contexts,
    rows_of,
    scores_behind,
    undrawable,
)
from outrider.engine.sampling.transforms import transform
from outrider.errors import OutriderError
from outrider.parameters import Acceptance, Rule
from outrider.token_tree import TokenTree
from target_service.acceptance import Walk, child_with, walk
from target_service.rules.block import block
from target_service.rules.lenient import lenient_greedy
from target_service.rules.outcome import Floats, Outcome
from target_service.rules.ratio import ratio
from target_service.rules.typical import exp_entropies, typical_children


def find_substitutes(
    runner: ModelRunner, inputs: Sequence[DrawInput], logits: Tensor, ranges: Sequence[range], drawn: Sequence[Drawn]
) -> Mapping[int, Sequence[int]]:
    """For each number of an input under `typical` the child that its root and each row prefer, 0 for none.

    `drawn` are the target's own draws. Where one was proposed, no other child is asked for.
    """
    places: dict[int, dict[int, int]] = {}
    rows: list[int] = []
    for number, (draw_input, each) in enumerate(zip(inputs, drawn, strict=True)):
        if draw_input.spec.acceptance.rule is Rule.TYPICAL and len(draw_input.feed.tree) and isinstance(each, list):
            open_rows = _open_rows(draw_input.feed.tree, each)
            places[number] = {row: len(rows) + place for place, row in enumerate(open_rows)}
            rows += [ranges[number].start + row for row in open_rows]
    if not rows:
        return {}
    contexts = []
    for number, at in places.items():
        every_row = row_contexts(before_argmax(inputs[number]))
        contexts += [every_row[row] for row in at]
    scores = transform(logits[torch.tensor(rows, device=logits.device)], contexts, runner.vocabulary_size, runner.ops)
    target_probs = runner.ops.softmax(scores)
    peaks = exp_entropies(scores, target_probs)
    return {number: _preferred(inputs[number], at, target_probs, peaks) for number, at in places.items()}


def _open_rows(tree: TokenTree, drawn: Sequence[int]) -> list[int]:
    """The rows whose draw no child carries, of those that have children; a walk enters none without a draw."""
    parents = dict.fromkeys(tree.parents)
    return [row for row in parents if drawn[row] >= 0 and not child_with(tree, row, drawn[row])]


def _preferred(draw_input: DrawInput, at: Mapping[int, int], target_probs: Tensor, peaks: Sequence[float]) -> list[int]:
    """The children that one session's rows prefer; row r's probabilities are target_probs[at[r]]."""
    tree, wanted = draw_input.feed.tree, draw_input.spec.acceptance
    children = [row for row in range(1, len(tree) + 1) if tree.parents[row - 1] in at]
    token_ids = torch.tensor(
        [tree.token_ids[row - 1] for row in children], dtype=torch.int64, device=target_probs.device
    )
    parents = torch.tensor(
        [at[tree.parents[row - 1]] for row in children], dtype=torch.int64, device=target_probs.device
    )
    child_probs = [0.0] * len(tree)
    for row, prob in zip(children, target_probs[parents, token_ids].tolist(), strict=True):
        child_probs[row - 1] = prob
    limits = [1.0] * (len(tree) + 1)
    for row, place in at.items():
        limits[row] = min(wanted.typical_epsilon, wanted.typical_delta * peaks[place])
    return typical_children(tree, child_probs, limits)


@dataclass(frozen=True, slots=True)
class Drafts:
    """Chains of one length K as the rules want them: ids and uniforms [B, K], distributions [B, K, N] padded with
    weight 0.
    """

    token_ids: Tensor
    support_ids: Tensor
    support_weights: Tensor
    uniforms: Tensor

    @classmethod
    def of(cls, inputs: Sequence[DrawInput], count: int) -> Self:
        """The first `count` draft tokens of each input."""
        distributions = [draw_input.feed.tree.distributions[:count] for draw_input in inputs]
        width = max((len(distribution.token_ids) for chain in distributions for distribution in chain), default=0)
        support_ids, support_weights = np.zeros((2, len(inputs), count, width), dtype=np.int64)
        for number, chain in enumerate(distributions):
            for place, distribution in enumerate(chain):
                support_ids[number, place, : len(distribution.token_ids)] = distribution.token_ids
                support_weights[number, place, : len(distribution.weights)] = distribution.weights
        token_ids = np.array([draw_input.feed.tree.token_ids[:count] for draw_input in inputs], dtype=np.int64)
        arrays = token_ids, support_ids, support_weights, _uniforms(inputs, count)
        return cls(*(torch.from_numpy(array) for array in arrays))


def decide_chains(
    runner: ModelRunner, inputs: Sequence[DrawInput], logits: Tensor, ranges: Sequence[range]
) -> list[Walk | OutriderError]:
    """The walks of chains of one length under one rule; the rows of inputs[i] are logits[ranges[i]].

    All at once; when that fails, each alone, to find those at fault.
    """
    try:
        scores = scores_behind(runner, rows_of(logits, ranges), [_rule_input(draw_input) for draw_input in inputs])
        target_probs = runner.ops.softmax(scores)
    except ValueError:
        return [
            _decide_alone(runner, draw_input, rows_of(logits, [rows]))
            for draw_input, rows in zip(inputs, ranges, strict=True)
        ]
    return [*_walks(inputs, target_probs.view(len(inputs), -1, target_probs.shape[1]))]


def _decide_alone(runner: ModelRunner, draw_input: DrawInput, logits: Tensor) -> Walk | OutriderError:
    """One session's walk along the rows that can be drawn, up to the first that cannot.

    The chain is cut there behind its last token, never before it: dropped for what stands behind it, a token would be
    judged by more than its own probability.
    """
    rows: list[Tensor] = []
    for row, context in enumerate(row_contexts(_rule_input(draw_input))):
        try:
            scores = transform(logits[row : row + 1], [context], runner.vocabulary_size, runner.ops)
            rows.append(runner.ops.softmax(scores))
        except ValueError as error:
            if not row:
                return undrawable(len(context.committed), error)
            rows.append(torch.zeros_like(rows[0]))
            break
    return _walks([draw_input], torch.stack(rows, dim=1))[0]


def _walks(inputs: Sequence[DrawInput], target_probs: Tensor) -> list[Walk]:
    """Walks along the first K tokens of each chain, for target_probs [B, K + 1, V]; of the last row all may be 0."""
    drafts = Drafts.of(inputs, target_probs.shape[1] - 1)
    outcome = _outcome(inputs[0], target_probs, drafts)
    counts = outcome.accepted_count.tolist()
    keys = np.array([_next_key(*each, drafts) for each in zip(inputs, counts, strict=True)], dtype=np.int64)
    next_ids = draw_from(outcome.probs, torch.from_numpy(keys)).tolist()
    return [_walk(draw_input, *found) for draw_input, *found in zip(inputs, counts, next_ids, strict=True)]


def _outcome(draw_input: DrawInput, target_probs: Tensor, drafts: Drafts) -> Outcome:
    """What the rule of this input, which is that of all, says about the chains."""
    acceptance = draw_input.spec.acceptance
    distributions = drafts.token_ids, drafts.support_ids, drafts.support_weights, drafts.uniforms
    if acceptance.rule is Rule.BLOCK:
        return block(target_probs, *distributions)
    if acceptance.rule is Rule.RATIO:
        return ratio(target_probs, *distributions)
    if draw_input.spec.sampling.temperature == 0:
        return lenient_greedy(target_probs, drafts.token_ids, acceptance.lenience)
    return ratio(target_probs, *distributions, acceptance.lenience)


def _walk(draw_input: DrawInput, accepted_count: int, next_token_id: int) -> Walk:
    draft_count = len(draw_input.feed.tree)
    if next_token_id < 0:
        # Nothing can be drawn behind the last accepted token, so that its row is not entered; the next step says why.
        accepted_count -= 1
        next_token_id = draw_input.feed.tree.token_ids[accepted_count]
    rows = tuple(range(1, accepted_count + 1))
    return Walk(rows, next_token_id, accepted_count + (accepted_count < draft_count))


def _rule_input(draw_input: DrawInput) -> DrawInput:
    """The input whose transforms give the probabilities that the rule looks at."""
    return before_argmax(draw_input) if draw_input.spec.acceptance.rule is Rule.LENIENT else draw_input


def _uniforms(inputs: Sequence[DrawInput], count: int) -> Floats:
    keys = [
        round_key(
            draw_input.spec.seed, len(draw_input.feed.session), len(draw_input.feed.session) + place, Purpose.ACCEPTANCE
        )
        for draw_input in inputs
        for place in range(count)
    ]
    return first_uniforms(keys).reshape(len(inputs), count)


def _next_key(draw_input: DrawInput, accepted_count: int, drafts: Drafts) -> int:
    purpose = Purpose.TOKEN if accepted_count == drafts.token_ids.shape[1] else Purpose.RESIDUAL
    return noise_key(draw_input.spec.seed, len(draw_input.feed.session) + accepted_count, purpose)


@dataclass(frozen=True, slots=True)
class Kind:
    """What chains must have in common to be decided at once."""

    acceptance: Acceptance
    is_greedy: bool
    draft_count: int


def decide(
    runner: ModelRunner, inputs: Sequence[DrawInput], logits: Tensor, ranges: Sequence[range]
) -> list[Walk | OutriderError]:
    """The walk of each session through its proposal, or why there is none.

    The rows of inputs[i] are logits[ranges[i]], the root's first. Keeps nothing: the same input and logits give the
    same walk, on the CPU whatever stands beside them.
    """
    kinds = [_kind(draw_input) for draw_input in inputs]
    if not any(kinds):
        return _follow_draws(runner, inputs, logits, ranges)
    decided: dict[int, Walk | OutriderError] = {}
    for kind in dict.fromkeys(kinds):
        numbers = [number for number, other in enumerate(kinds) if other == kind]
        decide_group = decide_chains if kind else _follow_draws
        chosen, rows = [inputs[number] for number in numbers], [ranges[number] for number in numbers]
        decided |= zip(numbers, decide_group(runner, chosen, logits, rows), strict=True)
    return [decided[number] for number in range(len(inputs))]


def _kind(draw_input: DrawInput) -> Kind | None:
    """The kind of a chain that is tested with uniforms or against a bound, None for whatever follows draws."""
    spec, draft_count = draw_input.spec, len(draw_input.feed.tree)
    if not draft_count or not spec.acceptance.rule.needs_distributions:
        return None
    return Kind(spec.acceptance, spec.sampling.temperature == 0, draft_count)


def _follow_draws(
    runner: ModelRunner, inputs: Sequence[DrawInput], logits: Tensor, ranges: Sequence[range]
) -> list[Walk | OutriderError]:
    """The rules `match` and `typical`, and every rule without a proposal: a draw behind each row, and a walk."""
    drawn = draw_each(runner, logits, inputs, ranges)
    substitutes = find_substitutes(runner, inputs, logits, ranges, drawn)
    return [
        each if isinstance(each, OutriderError) else walk(draw_input.feed.tree, each, substitutes.get(number, ()))
        for number, (draw_input, each) in enumerate(zip(inputs, drawn, strict=True))
    ]
