"""Several guesses as one tree, and the most valuable rows of one. Pure.

Under a rule that follows the target's own draws (`match`, `typical`) any tree gives the same tokens, so equal guesses
become one row, and rows may be left out by what they are worth. Under a rule that tests with uniforms a row must be
tested as it was drawn: guesses of several drafters stand side by side in the order of the drafters, duplicates too, as
in SpecInfer (Miao et al., 2024, arXiv 2305.09781), and none is left out for its token or its value.
"""

from collections.abc import Sequence
from dataclasses import replace

from gateway.rounds.round import LOOKUP, NOTHING, HopCost, Proposal
from outrider.parameters import DraftDistribution, Rule
from outrider.token_tree import TokenTree


def _rows_of(tree: TokenTree, kept: Sequence[int]) -> TokenTree:
    """The rows of these indices, in order; a row's parent must be among them."""
    numbers = {0: 0} | {index + 1: number for number, index in enumerate(kept, start=1)}
    return TokenTree(
        tuple(tree.token_ids[index] for index in kept),
        tuple(numbers[tree.parents[index]] for index in kept),
        logprobs=tuple(tree.logprobs[index] for index in kept) if tree.logprobs else (),
        values=tuple(tree.values[index] for index in kept),
    )


def _best(tree: TokenTree, count: int) -> list[int]:
    """The indices of the most valuable rows in order; of equal ones the first, so no child goes before its parent."""
    return sorted(sorted(range(len(tree)), key=lambda index: -tree.values[index])[:count])


def cut(proposal: Proposal, count: int) -> Proposal:
    """A proposal of the `count` most valuable rows of a tree whose values never rise along a path."""
    if count >= len(proposal.tree):
        return proposal
    kept, sources = _best(proposal.tree, count), proposal.sources
    return replace(
        proposal,
        tree=_rows_of(proposal.tree, kept),
        sources=tuple(sources[index] for index in kept) if sources else (),
    )


def one_hot(tree: TokenTree) -> TokenTree:
    """A tree of guesses that were not drawn: each has a distribution of its own token alone, which is exact too."""
    return replace(tree, distributions=tuple(DraftDistribution((token_id,), (1,)) for token_id in tree.token_ids))


def merged(proposals: Sequence[Proposal], rule: Rule, max_rows: int, draft_count: int = 0) -> Proposal:
    """One proposal of several, at most max_rows rows; each that has a tree has values too, under a rule without draws.

    draft_count is what each draft was asked for. It cost as much as the slowest, and says why there is nothing as the
    first does.
    """
    found = [each for each in proposals if each.tree]
    if not found:
        return next((each for each in proposals if each.fallback_reason), NOTHING)
    if rule.needs_distributions:
        tree, sources = _side_by_side(found, max_rows, draft_count)
    else:
        tree, sources = _union(found, max_rows)
    hops = [each.hop for each in found]
    return Proposal(
        tree,
        compute_us=max(each.compute_us for each in found),
        forward_count=max(each.forward_count for each in found),
        row_count=max(each.row_count for each in found),
        caught_up_count=max(each.caught_up_count for each in found),
        hop=HopCost(
            max(hop.queue_us for hop in hops), max(hop.wait_us for hop in hops), sum(hop.num_bytes for hop in hops)
        ),
        drift_repairs=sum(each.drift_repairs for each in proposals),
        sources=sources,
        parts=tuple(found),
    )


def _side_by_side(proposals: Sequence[Proposal], max_rows: int, draft_count: int) -> tuple[TokenTree, tuple[str, ...]]:
    """All rows in the order of the proposals; one that has no room left is left out whole.

    A draft takes the room that it was asked to fill: how many rows it has drawn depends on its tokens, and what is left
    out for its tokens biases the distribution.
    """
    left = max_rows
    token_ids: list[int] = []
    parents: list[int] = []
    distributions: list[DraftDistribution] = []
    sources: list[str] = []
    for proposal in proposals:
        tree, first = proposal.tree, len(token_ids)
        needed = len(tree) if proposal.drafter == LOOKUP else max(len(tree), draft_count)
        if needed <= left:
            left -= needed
            token_ids += tree.token_ids
            parents += [parent and parent + first for parent in tree.parents]
            distributions += tree.distributions
            sources += [proposal.source(row) for row in range(1, len(tree) + 1)]
    return TokenTree(tuple(token_ids), tuple(parents), tuple(distributions)), tuple(sources)


def _union(proposals: Sequence[Proposal], max_rows: int) -> tuple[TokenTree, tuple[str, ...]]:
    """The union of the paths; a row that several have is worth what it is to the one who values it most."""
    token_ids: list[int] = []
    parents: list[int] = []
    values: list[float] = []
    sources: list[str] = []
    rows: dict[tuple[int, int], int] = {}
    for proposal in proposals:
        tree, numbers = proposal.tree, [0]
        for row, (token_id, parent, value) in enumerate(zip(tree.token_ids, tree.parents, tree.values, strict=True), 1):
            place = numbers[parent], token_id
            if place not in rows:
                token_ids.append(token_id)
                parents.append(numbers[parent])
                values.append(value)
                sources.append(proposal.source(row))
                rows[place] = len(token_ids)
            number = rows[place]
            numbers.append(number)
            # No row may be worth more than its parent, which another proposal may have valued less.
            while number and values[number - 1] < value:
                values[number - 1] = value
                number = parents[number - 1]
    whole = TokenTree(tuple(token_ids), tuple(parents), values=tuple(values))
    kept = _best(whole, max_rows)
    return _rows_of(whole, kept), tuple(sources[index] for index in kept)
