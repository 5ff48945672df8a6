"""Draft tokens that the target keeps: each session's rule, many sessions at once, and what a walk commits.

Under `match` the target draws its own token at every row of the proposal, with the noise of that position, and follows
the child that carries it. What is committed is therefore what plain decoding with the same noise would have drawn,
whatever the draft proposed. A draft that uses the same noise proposes the target's token as often as the two
distributions allow without communication: Daliri, Musco and Suresh, "Coupling without communication and
drafter-invariant speculative decoding", 2024, arXiv 2408.07978. The other rules are pure functions in `rules/`; here
they get their probabilities, distributions and uniforms. An empty proposal is plain decoding under every rule. A
session that cannot be served fails alone.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.beams import BeamStep
from outrider.drafters.drafter import NO_PROPOSAL, DrafterProposal
from outrider.engine.devices import send
from outrider.engine.noise import Purpose, first_uniforms, noise_key, round_key
from outrider.engine.ops.faults import check_probs
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
from outrider.engine.sampling.transforms import index, transform
from outrider.engine.walk import Walk, child_with, count_evaluated, walk
from outrider.errors import OutriderError
from outrider.parameters import Acceptance, FinishReason, Rule, SessionSpec, TokenLogprob
from outrider.token_tree import TokenTree
from target_service.rules.block import block
from target_service.rules.lenient import lenient_greedy
from target_service.rules.outcome import ChainOutcome
from target_service.rules.ratio import ratio
from target_service.rules.typical import exp_entropies, typical_children
from target_service.trees import KeptPath, keep_path


class TargetVerdict(NamedTuple):
    """Tokens that the target commits on top of the first `base_len` tokens, with what is known of them.

    `token_ids` are the tokens of the accepted rows, then `next_token_id` unless that is None because the request ended
    within the accepted rows. `finish_reason` says why the last of them is the request's last token, None while it goes
    on. `evaluated_count` draft tokens were tested.
    """

    base_len: int
    accepted_rows: tuple[int, ...]
    token_ids: tuple[int, ...]
    next_token_id: int | None
    finish_reason: FinishReason | None
    evaluated_count: int
    logprobs: tuple[TokenLogprob, ...] = ()
    """One entry for each of token_ids, where the request asked for them."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """One entry for each token of the prompt but the first, where the request asked for them and this comes first."""
    prefix_len: int = 0
    """Tokens found in the prefix cache, at the opening or while others read them, where this is its first verdict."""
    hosted: DrafterProposal = NO_PROPOSAL
    """Proposal of the session's own drafter; accepted_rows counts its rows."""
    beam_steps: tuple[BeamStep, ...] = ()
    """Steps of a beam search; accepted_rows and next_token_id are then what the best beam has gained."""
    goes_on: bool = False
    """Whether the next verdict is under way already."""
    is_of_branch: bool = False
    """Whether the proposal came before it was known what it would follow; it is `hosted` then."""


def commit_walk(tree: TokenTree, walked: Walk, spec: SessionSpec, base_len: int) -> TargetVerdict:
    """Commits what a walk accepted, up to the first token that ends the request.

    A draft token that is accepted and ends the request is the last one: there is no next token, and nothing after it
    counts as evaluated. EOS comes before a stop token, and both before the length. Raises ValueError when the request
    had ended before.
    """
    if base_len >= spec.max_len:
        raise ValueError(f"a request of {spec.max_len} tokens has ended at {base_len}")
    token_ids = (*(tree.token_ids[row - 1] for row in walked.accepted_rows), walked.next_token_id)
    for count, token_id in enumerate(token_ids, start=1):
        reason = _finish_reason(token_id, base_len + count, spec)
        if reason is not None and count <= len(walked.accepted_rows):
            rows = walked.accepted_rows[:count]
            evaluated_count = count_evaluated(tree, (0, *rows[:-1]))
            return TargetVerdict(base_len, rows, token_ids[:count], None, reason, evaluated_count)
    # The loop ended at the next token, so that `reason` is the one of that token.
    rows, next_token_id = walked.accepted_rows, walked.next_token_id
    return TargetVerdict(base_len, rows, token_ids, next_token_id, reason, walked.evaluated_count)


def _finish_reason(token_id: int, length: int, spec: SessionSpec) -> FinishReason | None:
    if token_id in spec.eos_token_ids:
        return FinishReason.EOS
    if token_id in spec.stop_token_ids:
        return FinishReason.STOP_TOKEN
    return FinishReason.LENGTH if length >= spec.max_len else None


def decide(
    runner: ModelRunner, inputs: Sequence[DrawInput], logits: Tensor, ranges: Sequence[range]
) -> list[Walk | OutriderError]:
    """The walk of each session through its proposal, or why there is none.

    The rows of inputs[i] are logits[ranges[i]], the root's first. Keeps nothing: the same input and logits give the
    same walk, on the CPU whatever stands beside them.
    """
    # Chains that are tested with uniforms or against a bound are decided at once where they have in common the rule,
    # whether the temperature is 0, and the length; the last is 0 for trees, and None is for whatever follows draws.
    kinds = [
        (each.spec.acceptance, each.spec.sampling.temperature == 0, len(each.feed.tree) * each.feed.tree.is_chain)
        if each.feed.tree and each.spec.acceptance.rule.needs_distributions
        else None
        for each in inputs
    ]
    decided: dict[int, Walk | OutriderError] = {}
    for kind in dict.fromkeys(kinds):
        numbers = [number for number, other in enumerate(kinds) if other == kind]
        decide_group = _follow_draws if kind is None else _decide_chains if kind[-1] else _decide_trees
        chosen, rows = [inputs[number] for number in numbers], [ranges[number] for number in numbers]
        decided |= zip(numbers, decide_group(runner, chosen, logits, rows), strict=True)
    return [_confirmed(each, decided[number]) for number, each in enumerate(inputs)]


def _confirmed(draw_input: DrawInput, found: Walk | OutriderError) -> Walk | OutriderError:
    """A walk up to the first row that has another mask in plain decoding than it has had as a guess, mostly all of it.

    That row's token is committed as the last one, and the next step says what follows it, or that nothing does.
    """
    spec, session, tree = draw_input.spec, draw_input.feed.session, draw_input.feed.tree
    if session.grammar is None or isinstance(found, OutriderError) or not found.accepted_rows:
        return found
    rows = found.accepted_rows
    path = [tree.token_ids[row - 1] for row in rows]
    output = session.token_ids[spec.prompt_len :]
    count = session.grammar.confirmed(output, path, spec.eos_token_ids | spec.stop_token_ids)
    if count == len(path):
        return found
    return Walk(rows[:count], path[count], count_evaluated(tree, (0, *rows[:count])))


def _follow_draws(
    runner: ModelRunner, inputs: Sequence[DrawInput], logits: Tensor, ranges: Sequence[range]
) -> list[Walk | OutriderError]:
    """The rules `match` and `typical`, and every rule without a proposal: a draw after each row, and a walk."""
    drawn = draw_each(runner, logits, inputs, ranges)
    substitutes = _find_substitutes(runner, inputs, logits, ranges, drawn)
    return [
        found if isinstance(found, OutriderError) else walk(each.feed.tree, found, substitutes.get(number, ()))
        for number, (each, found) in enumerate(zip(inputs, drawn, strict=True))
    ]


def _find_substitutes(
    runner: ModelRunner, inputs: Sequence[DrawInput], logits: Tensor, ranges: Sequence[range], drawn: Sequence[Drawn]
) -> Mapping[int, Sequence[int]]:
    """Child that the root and each row prefer, 0 for none, for each number of an input under `typical`.

    `drawn` are the target's own draws. Where one was proposed, no other child is asked for.
    """
    places: dict[int, dict[int, int]] = {}
    rows: list[int] = []
    for number, (each, found) in enumerate(zip(inputs, drawn, strict=True)):
        tree = each.feed.tree
        if each.spec.acceptance.rule is Rule.TYPICAL and len(tree) and isinstance(found, list):
            # A walk enters no row without a draw.
            parents = dict.fromkeys(tree.parents)
            open_rows = [row for row in parents if found[row] >= 0 and not child_with(tree, row, found[row])]
            places[number] = {row: len(rows) + place for place, row in enumerate(open_rows)}
            rows += [ranges[number].start + row for row in open_rows]
    if not rows:
        return {}
    contexts = []
    for number, at in places.items():
        every_row = row_contexts(before_argmax(inputs[number]))
        contexts += [every_row[row] for row in at]
    chosen = logits.index_select(0, index(rows, logits))
    scores = transform(chosen, contexts, runner.vocabulary_size, runner.ops)
    target_probs = runner.ops.softmax(scores)
    peaks = exp_entropies(scores, target_probs)
    return {
        number: _preferred(inputs[number].feed.tree, inputs[number].spec.acceptance, at, target_probs, peaks)
        for number, at in places.items()
    }


def _preferred(
    tree: TokenTree, wanted: Acceptance, at: Mapping[int, int], target_probs: Tensor, peaks: Sequence[float]
) -> list[int]:
    """The children that one session's rows prefer; row r's probabilities are target_probs[at[r]]."""
    children = [row for row in range(1, len(tree) + 1) if tree.parents[row - 1] in at]
    parents = [at[tree.parents[row - 1]] for row in children]
    token_ids = [tree.token_ids[row - 1] for row in children]
    places = send(np.array([parents, token_ids], dtype=np.int64), target_probs.device)
    child_probs = [0.0] * len(tree)
    for row, prob in zip(children, target_probs[places[0], places[1]].tolist(), strict=True):
        child_probs[row - 1] = prob
    limits = [1.0] * (len(tree) + 1)
    for row, place in at.items():
        limits[row] = min(wanted.typical_epsilon, wanted.typical_delta * peaks[place])
    return typical_children(tree, child_probs, limits)


def _decide_trees(
    runner: ModelRunner, inputs: Sequence[DrawInput], logits: Tensor, ranges: Sequence[range]
) -> list[Walk | OutriderError]:
    """The walks through trees that are no chains, each alone."""
    walks: list[Walk | OutriderError] = []
    for each, rows in zip(inputs, ranges, strict=True):
        path = keep_path(runner, each, rows_of(logits, [rows]))
        if isinstance(path, KeptPath):
            walks.append(Walk(*path, count_evaluated(each.feed.tree, (0, *path.rows))))
        else:
            walks.append(path)
    return walks


def _decide_chains(
    runner: ModelRunner, inputs: Sequence[DrawInput], logits: Tensor, ranges: Sequence[range]
) -> list[Walk | OutriderError]:
    """The walks of chains of one kind. All at once; when that fails, each alone, to find those at fault."""
    # The input whose transforms give the probabilities that the rule looks at.
    is_lenient = inputs[0].spec.acceptance.rule is Rule.LENIENT
    looked_at = [before_argmax(each) if is_lenient else each for each in inputs]
    try:
        target_probs = check_probs(runner.ops.softmax(scores_behind(runner, rows_of(logits, ranges), looked_at)))
    except ValueError:
        return [
            _decide_alone(runner, each, other, rows_of(logits, [rows]))
            for each, other, rows in zip(inputs, looked_at, ranges, strict=True)
        ]
    return [*_walks(inputs, target_probs.view(len(inputs), -1, target_probs.shape[1]))]


def _decide_alone(
    runner: ModelRunner, draw_input: DrawInput, looked_at: DrawInput, logits: Tensor
) -> Walk | OutriderError:
    """Walk of one session along the rows that can be drawn, up to the first that cannot.

    The chain is cut there after its last token, never before it: dropped for what follows it, a token would be
    judged by more than its own probability.
    """
    rows: list[Tensor] = []
    for row, context in enumerate(row_contexts(looked_at)):
        try:
            scores = transform(logits[row : row + 1], [context], runner.vocabulary_size, runner.ops)
            rows.append(check_probs(runner.ops.softmax(scores)))
        except ValueError as error:
            if not row:
                return undrawable(runner, logits[row : row + 1], draw_input, context, error)
            rows.append(torch.zeros_like(rows[0]))
            break
    return _walks([draw_input], torch.stack(rows, dim=1))[0]


def _walks(inputs: Sequence[DrawInput], target_probs: Tensor) -> list[Walk]:
    """Walks along the first K tokens of each chain, for target_probs [B, K + 1, V]; of the last row all may be 0."""
    count = target_probs.shape[1] - 1
    outcome = _outcome(inputs, target_probs, count)
    accepted_counts = outcome.accepted_count.tolist()
    keys = []
    for each, accepted_count in zip(inputs, accepted_counts, strict=True):
        purpose = Purpose.TOKEN if accepted_count == count else Purpose.RESIDUAL
        keys.append(noise_key(each.spec.seed, len(each.feed.session) + accepted_count, purpose))
    next_ids = draw_from(outcome.probs, torch.from_numpy(np.array(keys, dtype=np.int64))).tolist()
    walks = []
    for each, accepted_count, next_token_id in zip(inputs, accepted_counts, next_ids, strict=True):
        tree, kept, token_id = each.feed.tree, accepted_count, next_token_id
        if token_id < 0:
            # Nothing can be drawn after the last accepted token, so its row is not entered; the next step says why.
            kept -= 1
            token_id = tree.token_ids[kept]
        walks.append(Walk(tuple(range(1, kept + 1)), token_id, kept + (kept < len(tree))))
    return walks


def _outcome(inputs: Sequence[DrawInput], target_probs: Tensor, count: int) -> ChainOutcome:
    """Outcome of the rule of all these chains for the first `count` tokens of each.

    Supports are padded with weight 0 to the widest, [B, count, N].
    """
    trees, acceptance = [each.feed.tree for each in inputs], inputs[0].spec.acceptance
    token_ids = torch.from_numpy(np.array([tree.token_ids[:count] for tree in trees], dtype=np.int64))
    if acceptance.rule is Rule.LENIENT and inputs[0].spec.sampling.temperature == 0:
        return lenient_greedy(target_probs, token_ids, acceptance.lenience)
    chains = [tree.distributions[:count] for tree in trees]
    width = max((len(each.token_ids) for chain in chains for each in chain), default=0)
    ids, weights = np.zeros((2, len(inputs), count, width), dtype=np.int64)
    for number, chain in enumerate(chains):
        for place, each in enumerate(chain):
            ids[number, place, : len(each.token_ids)] = each.token_ids
            weights[number, place, : len(each.weights)] = each.weights
    keys = [
        round_key(each.spec.seed, len(each.feed.session), len(each.feed.session) + place, Purpose.ACCEPTANCE)
        for each in inputs
        for place in range(count)
    ]
    uniforms = torch.from_numpy(first_uniforms(keys).reshape(len(inputs), count))
    drafted = token_ids, torch.from_numpy(ids), torch.from_numpy(weights), uniforms
    if acceptance.rule is Rule.BLOCK:
        return block(target_probs, *drafted)
    return ratio(target_probs, *drafted, acceptance.lenience if acceptance.rule is Rule.LENIENT else 1.0)
