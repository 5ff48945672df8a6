"""For tests of acceptance rules: proposals from any scores, every outcome of every draw, many two-round requests."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import numpy as np
import numpy.typing as npt
import torch
from scipy import stats
from support.basics import spec_of
from support.services.stepped_target import Target
from torch import Tensor

from outrider.engine.batching import Feed
from outrider.engine.noise import GAMMA, MASK, MULTIPLIERS, SHIFTS, Purpose, first_uniforms, noise_key, round_key
from outrider.engine.ops import choose_ops
from outrider.engine.runner import ModelRunner
from outrider.engine.sampling.draft_distribution import DraftDistributions, quantise
from outrider.engine.sampling.draw import DrawInput, draw_from, row_contexts
from outrider.engine.sampling.transforms import RowContext, transform
from outrider.engine.walk import walk
from outrider.model_service.outbox import SessionAnswer
from outrider.parameters import Acceptance, Rule, SamplingParameters, SessionSpec, TokenLogprob
from outrider.token_tree import TokenTree
from target_service.rules.outcome import ChainOutcome
from target_service.rules.ratio import ratio

Floats = npt.NDArray[np.float64]
# Searches of so many steps each, by which the place of a threshold is known to 52 bits.
WIDTH, SEARCHES = 130, 8
RuleFunction = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], ChainOutcome]


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """Target distributions and the draft's weights, both [V + 1, V]: row v after token v, the last row after the
    prefix.
    """

    target: Floats
    weights: npt.NDArray[np.int64]

    @property
    def num_tokens(self) -> int:
        """Number of tokens, V."""
        return self.target.shape[1]

    @property
    def draft(self) -> Floats:
        """The draft's distributions [V + 1, V]."""
        return self.weights / self.weights.sum(axis=1, keepdims=True)

    def distribution(self, length: int) -> Floats:
        """The target's joint distribution [V, V, ...] of `length` tokens."""
        joint = self.target[-1]
        for _ in range(length - 1):
            joint = joint[..., None] * self.target[:-1]
        return joint


def chains(pair: Pair, count: int) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every chain of `count` tokens that the draft may draw, with its probability."""
    for chain in product(range(pair.num_tokens), repeat=count):
        rows = (-1, *chain[:-1])
        chance = float(np.prod([pair.draft[row, token_id] for row, token_id in zip(rows, chain, strict=True)]))
        if chance > 0:
            yield chain, chance


def ask(rule: RuleFunction, pair: Pair, chain: tuple[int, ...], uniforms: Floats) -> ChainOutcome:
    """The rule's answers about one chain for many uniforms [B, K]."""
    rows = torch.tensor((-1, *chain))
    width = len(uniforms)
    target_probs = torch.from_numpy(pair.target)[rows].expand(width, -1, -1)
    ids = torch.arange(pair.num_tokens).expand(width, len(chain), -1)
    weights = torch.from_numpy(pair.weights)[rows[:-1]].expand(width, -1, -1)
    return rule(target_probs, torch.tensor(chain).expand(width, -1), ids, weights, torch.from_numpy(uniforms))


def acceptance(rule: RuleFunction, pair: Pair, chain: tuple[int, ...]) -> list[tuple[int, float, Floats]]:
    """(accepted count, its probability over the uniforms, distribution of the next token) for every possible count.

    Each uniform is compared with one threshold, which is found to the last bit while the others stay where they are.
    """
    found: dict[int, tuple[float, Floats]] = {}
    for cell in _cells(rule, pair, chain):
        outcome = ask(rule, pair, chain, np.array([[middle for middle, _ in cell]]))
        count = int(outcome.accepted_count)
        probs = outcome.probs[0].numpy()
        chance = float(np.prod([width for _, width in cell]))
        found[count] = found.get(count, (0.0,))[0] + chance, probs / probs.sum()
    return [(count, *rest) for count, rest in found.items()]


def _cells(rule: RuleFunction, pair: Pair, chain: tuple[int, ...]) -> Iterator[tuple[tuple[float, float], ...]]:
    """Boxes of uniforms, (middle, width) for each: below and above the threshold of every place."""
    sides = [[(edge / 2, edge), ((1 + edge) / 2, 1 - edge)] for edge in _edges(rule, pair, chain)]
    yield from (cell for cell in product(*sides) if all(width > 0 for _, width in cell))


def _edges(rule: RuleFunction, pair: Pair, chain: tuple[int, ...]) -> list[float]:
    """For each place the chance that its test succeeds, by a search that asks for many uniforms at once."""
    edges = []
    for place in range(len(chain)):
        low, high = 0.0, 1.0
        for _ in range(SEARCHES):
            uniforms = np.linspace(low, high, WIDTH)
            place_of_low = int(_successes(rule, pair, chain, place, uniforms[1:-1]).sum())
            low, high = uniforms[place_of_low], uniforms[place_of_low + 1]
        edges.append(round(float(low), 15))
    return edges


def _successes(
    rule: RuleFunction, pair: Pair, chain: tuple[int, ...], place: int, uniforms: Floats
) -> npt.NDArray[np.bool_]:
    """Whether a test succeeds with each uniform: it decides where those before it succeed and those after it fail."""
    every = np.full((len(uniforms), len(chain)), 1 - 2.0**-53)
    every[:, :place] = 2.0**-60
    every[:, place] = uniforms
    return ask(rule, pair, chain, every).accepted_count.numpy() > place


def committed_distribution(rule: RuleFunction, pair: Pair, count: int, length: int) -> Floats:
    """The joint distribution [V, V, ...] of `length` tokens: a round with chains of `count`, then the target alone."""
    joint = np.zeros((pair.num_tokens,) * length)
    for chain, drawn in chains(pair, count):
        for accepted, chance, next_distribution in acceptance(rule, pair, chain):
            _add(joint, pair, chain[:accepted], drawn * chance * next_distribution)
    return joint


def mean_accepted(rule: RuleFunction, pair: Pair, count: int) -> float:
    """Expected number of draft tokens that are kept."""
    return sum(
        drawn * chance * accepted
        for chain, drawn in chains(pair, count)
        for accepted, chance, _ in acceptance(rule, pair, chain)
    )


def _add(joint: Floats, pair: Pair, kept: tuple[int, ...], next_distribution: Floats) -> None:
    """Adds what one outcome commits, cut or continued to the length of `joint`."""
    if len(kept) >= joint.ndim:
        joint[kept[: joint.ndim]] += next_distribution.sum()
        return
    tail = next_distribution
    for _ in range(joint.ndim - len(kept) - 1):
        tail = tail[..., None] * pair.target[:-1]
    joint[kept] += tail


RULES_WITH_LAWS = tuple(rule for rule in Rule if rule.needs_distributions)


def drafted(runner: ModelRunner, spec: SessionSpec, count: int, noise: float = 0.3, top_n: int = 32) -> TokenTree:
    """A chain after the spec's tokens, from the runner's own logits with noise on them: most tokens are accepted.

    Drawn from its distributions, and with them, where the spec's rule needs them, and else with the target's own noise.
    """
    dice = torch.Generator().manual_seed(spec.seed)
    token_ids, distributions = list(spec.token_ids), []
    for _ in range(count):
        logits = logits_behind(runner, token_ids)
        logits = logits + noise * torch.randn(logits.shape, generator=dice)
        session = runner.open(token_ids, spec.prompt_len)
        [context] = row_contexts(DrawInput(Feed(session), spec))
        scores = transform(logits, [context], runner.vocabulary_size, runner.ops)
        if spec.acceptance.rule.needs_distributions:
            distribution = quantise(scores, top_n, runner.ops)
            key = round_key(spec.seed, len(spec.token_ids), len(token_ids), Purpose.DRAFT)
            token_ids += distribution.draw(torch.tensor([key])).tolist()
            distributions += distribution.distributions()
        else:
            key = noise_key(spec.seed, len(token_ids), Purpose.TOKEN)
            token_ids += runner.ops.draw(scores, torch.tensor([key])).tolist()
    return TokenTree.chain(token_ids[len(spec.token_ids) :], distributions)


def logits_behind(runner: ModelRunner, token_ids: list[int]) -> Tensor:
    """The one row of logits [1, V] after these tokens."""
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


PROMPT = (1, 2, 3)
BASE = len(PROMPT)
PLAIN = SamplingParameters()
OPS = choose_ops(torch.device("cpu"), num_threads=1)
# Numbers of one temporary, few enough to stay in a processor's cache.
CHUNK_NUMBERS = 1 << 18
# A cell of a chi-square test that is expected more rarely than this is counted with the others like it.
RARE = 5

Words = npt.NDArray[np.uint64]
Key = Callable[[Words, int, int], Words]


@dataclass(frozen=True, slots=True, eq=False)
class Language:
    """Logits [V + 1, V] of both models: row v after token v, the last row after the prompt."""

    target: Tensor
    draft: Tensor
    sampling: SamplingParameters = PLAIN

    @classmethod
    def random(cls, num_tokens: int, likeness: float, sampling: SamplingParameters = PLAIN) -> "Language":
        """The draft has the target's logits times likeness (-1: the hardest case), and the less the more of others."""
        generator = torch.Generator().manual_seed(20)
        target, other = torch.randn(2, num_tokens + 1, num_tokens, generator=generator) * 1.2
        return cls(target, likeness * target + (1 - abs(likeness)) * other, sampling)

    @property
    def num_tokens(self) -> int:
        """Number of tokens, V."""
        return self.target.shape[1]

    def scores(self, logits: Tensor) -> Tensor:
        """Transformed scores of one model's table, of which no row depends on what was said before."""
        rows = [RowContext(self.sampling, PROMPT, (), BASE, frozenset())] * len(logits)
        return transform(logits, rows, self.num_tokens, OPS)

    def distribution(self, length: int) -> Floats:
        """The joint distribution [V, V, ...] of the target's first `length` tokens."""
        probs: Floats = self.scores(self.target).double().softmax(dim=-1).numpy()
        joint = probs[-1]
        for _ in range(length - 1):
            joint = joint[..., None] * probs[:-1]
        return joint


def draft_key(seeds: Words, base_len: int, position: int) -> Words:
    """Key of the draft's own draw."""
    return round_keys(seeds, base_len, position, Purpose.DRAFT)


def acceptance_key(seeds: Words, base_len: int, position: int) -> Words:
    """Key of the uniform that decides about a draft token."""
    return round_keys(seeds, base_len, position, Purpose.ACCEPTANCE)


def residual_key(seeds: Words, _base_len: int, position: int) -> Words:
    """Key of the token in the place of a rejected one."""
    return noise_keys(seeds, position, Purpose.RESIDUAL)


def token_key(seeds: Words, _base_len: int, position: int) -> Words:
    """Key of the target's own token."""
    return noise_keys(seeds, position, Purpose.TOKEN)


def noise_keys(seeds: Words, position: int, purpose: Purpose) -> Words:
    """`noise_key` of many seeds, bit for bit: a test compares them. One at a time they would take minutes."""
    key = mixed(mixed(seeds + np.uint64(GAMMA)) + np.uint64(GAMMA * (position + 1) & MASK))
    return mixed(key + np.uint64(GAMMA * (purpose + 1) & MASK))


def round_keys(seeds: Words, base_len: int, position: int, purpose: Purpose) -> Words:
    """`round_key` of many seeds, bit for bit."""
    return mixed(~noise_keys(seeds, position, purpose) + np.uint64(GAMMA * (base_len + 1) & MASK))


def mixed(words: Words) -> Words:
    """The finaliser of splitmix64."""
    for shift, multiplier in zip(SHIFTS, (*MULTIPLIERS, 1), strict=True):
        words = (words ^ (words >> np.uint64(shift))) * np.uint64(multiplier)
    return words


@cache
def keys_of_all(key: Key, base_len: int, position: int, num_seeds: int) -> Tensor:
    """Keys [num_seeds] of the seeds 0, 1, 2, ..., as the engine takes them."""
    return torch.from_numpy(key(np.arange(num_seeds, dtype=np.uint64), base_len, position).view(np.int64))


class Rounds:
    """Requests with the seeds 0, 1, 2, ... under one rule, with chains of draft_count tokens in every round."""

    draft_key: Key = staticmethod(draft_key)
    acceptance_key: Key = staticmethod(acceptance_key)
    residual_key: Key = staticmethod(residual_key)
    token_key: Key = staticmethod(token_key)

    def __init__(
        self, language: Language, rule: RuleFunction = ratio, *, num_seeds: int, draft_count: int = 3, top_n: int = 256
    ) -> None:
        self.num_seeds, self.draft_count, self.rule = num_seeds, draft_count, rule
        self.num_tokens = language.num_tokens
        self.scores, self.draft_scores = language.scores(language.target), language.scores(language.draft)
        self.target_probs = OPS.softmax(self.scores)
        self.distributions = quantise(self.draft_scores, top_n, OPS)
        # What a draft token is drawn from: the distribution that is sent.
        self.drawn_from = self.distributions

    def tokens(self, length: int) -> Tensor:
        """The first tokens [num_seeds, length] of every request, by as many rounds as it needs."""
        output = torch.full((self.num_seeds, length + self.draft_count), -1)
        counts = torch.zeros(self.num_seeds, dtype=torch.int64)
        while (waiting := counts < length).any():
            for count in counts[waiting].unique().tolist():
                seeds = (counts == count).nonzero().flatten()
                last = output[seeds, count - 1] if count else torch.full_like(seeds, self.num_tokens)
                committed = self._play(seeds, BASE + count, last)
                output[seeds, count : count + self.draft_count + 1] = committed[:, : output.shape[1] - count]
                counts[seeds] += (committed >= 0).sum(dim=1)
        return output[:, :length]

    def _play(self, seeds: Tensor, base_len: int, last: Tensor) -> Tensor:
        size = max(CHUNK_NUMBERS // (self.num_tokens * (self.draft_count + 1)), 1)
        parts = zip(seeds.split(size), last.split(size), strict=True)
        return torch.cat([self.play(*part, base_len) for part in parts])

    def play(self, seeds: Tensor, last: Tensor, base_len: int) -> Tensor:
        """One round of the requests with these seeds: what it commits [B, K + 1], -1 after the last token."""
        rows = self.draft(seeds, last, base_len)
        committed = torch.full_like(rows, -1)
        counts = self.sent_counts(rows[:, 1:])
        for count in counts.unique().tolist():
            chosen = counts == count
            committed[chosen, : count + 1] = self.verify(seeds[chosen], rows[chosen, : count + 1], base_len)
        return committed

    def draft(self, seeds: Tensor, last: Tensor, base_len: int) -> Tensor:
        """The last committed token and the chain after it, [B, K + 1]."""
        rows = [last]
        for position in range(base_len, base_len + self.draft_count):
            keys = self.keys(self.draft_key, base_len, position)[seeds]
            rows.append(pick(self.drawn_from, rows[-1]).draw(keys))
        return torch.stack(rows, dim=1)

    def sent_counts(self, drafts: Tensor) -> Tensor:
        """How many tokens [B] of the chains [B, K] are sent: all of them."""
        return torch.full_like(drafts[:, 0], drafts.shape[1])

    def verify(self, seeds: Tensor, rows: Tensor, base_len: int) -> Tensor:
        """What the target commits of chains of equal length, [B, K + 1]."""
        draft_count = rows.shape[1] - 1
        if not draft_count:
            return self.drawn(rows, seeds, base_len)
        outcome = self.decide(rows, self.uniforms(seeds, base_len, draft_count))
        accepted = outcome.accepted_count[:, None]
        next_ids = draw_from(outcome.probs, self.next_keys(seeds, accepted, base_len, draft_count))
        committed = rows.roll(-1, dims=1).masked_fill(torch.arange(draft_count + 1) > accepted, -1)
        return committed.scatter(1, accepted, next_ids[:, None])

    def uniforms(self, seeds: Tensor, base_len: int, draft_count: int) -> Tensor:
        """One uniform [B, K] for each draft token."""
        keys = [self.keys(self.acceptance_key, base_len, base_len + place)[seeds] for place in range(draft_count)]
        return torch.from_numpy(np.stack([first_uniforms(each.tolist()) for each in keys], axis=1))

    def drawn(self, rows: Tensor, seeds: Tensor, base_len: int) -> Tensor:
        """The target's own token after each row [B, R], as plain decoding draws it."""
        keys = [self.keys(self.token_key, base_len, base_len + place)[seeds] for place in range(rows.shape[1])]
        return OPS.draw(self.scores[rows.flatten()], torch.stack(keys, dim=1).flatten()).view_as(rows)

    def decide(self, rows: Tensor, uniforms: Tensor) -> ChainOutcome:
        """The rule's answer about chains rows[:, 1:] after the tokens rows[:, 0]."""
        distributions = pick(self.distributions, rows[:, :-1])
        return self.rule(self.target_probs[rows], rows[:, 1:], distributions.token_ids, distributions.weights, uniforms)

    def next_keys(self, seeds: Tensor, accepted: Tensor, base_len: int, draft_count: int) -> Tensor:
        """Keys of the draw after the accepted tokens: a correction, or after all of them the target's own token."""
        ways = [self.keys(self.residual_key, base_len, base_len + count)[seeds] for count in range(draft_count)]
        ways.append(self.keys(self.token_key, base_len, base_len + draft_count)[seeds])
        return torch.stack(ways, dim=1).gather(1, accepted)[:, 0]

    def keys(self, key: Key, base_len: int, position: int) -> Tensor:
        """Keys of all requests at a position."""
        return keys_of_all(key, base_len, position, self.num_seeds)


class MatchRounds(Rounds):
    """Rounds under `match`: the draft draws with the target's noise, and the target's own draws decide."""

    def draft(self, seeds: Tensor, last: Tensor, base_len: int) -> Tensor:
        """The last committed token and the chain after it, [B, K + 1]."""
        rows = [last]
        for position in range(base_len, base_len + self.draft_count):
            keys = self.keys(self.token_key, base_len, position)[seeds]
            rows.append(OPS.draw(self.draft_scores[rows[-1]], keys))
        return torch.stack(rows, dim=1)

    def verify(self, seeds: Tensor, rows: Tensor, base_len: int) -> Tensor:
        """What the target commits of chains of equal length, [B, K + 1]."""
        drawn = self.drawn(rows, seeds, base_len).tolist()
        committed = []
        for token_ids, draws in zip(rows[:, 1:].tolist(), drawn, strict=True):
            way = walk(chain(tuple(token_ids)), draws)
            tokens = [*token_ids[: len(way.accepted_rows)], way.next_token_id]
            committed.append(tokens + [-1] * (rows.shape[1] - len(tokens)))
        return torch.tensor(committed)


@cache
def chain(token_ids: tuple[int, ...]) -> TokenTree:
    """The tree of width one."""
    return TokenTree.chain(token_ids)


def pick(distributions: DraftDistributions, rows: Tensor) -> DraftDistributions:
    """The distributions after these tokens."""
    return DraftDistributions(distributions.token_ids[rows], distributions.weights[rows])


def chance(tokens: Tensor, distribution: Floats, widths: Sequence[int] = ()) -> float:
    """p-value of the chi-square test of tokens [N, L] against their joint distribution; rare cells are counted as one.

    `widths` makes cells of so many neighbouring ids each, one number for every token.
    """
    expected, width = distribution, widths or (1,) * distribution.ndim
    for axis, (size, each) in enumerate(zip(distribution.shape, width, strict=True)):
        expected = np.add.reduceat(expected, range(0, size, each), axis=axis)
    cells = np.ravel_multi_index(tuple((tokens.numpy() // width).T), expected.shape)
    counts = np.bincount(cells, minlength=expected.size)
    expected = expected.ravel() * len(tokens)
    if counts[expected == 0].any():
        return 0.0
    rare = expected < RARE
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    return float(stats.chisquare(observed[wanted > 0], wanted[wanted > 0]).pvalue)


COUNT = 5
Entries = list[TokenLogprob]


def asking(spec: SessionSpec, count: int = COUNT) -> SessionSpec:
    """A copy of a request that asks for all log-probabilities."""
    return replace(spec, logprob_count=count, prompt_logprobs=True)


def entries_of(answers: Sequence[SessionAnswer], spec: SessionSpec) -> tuple[Entries, Entries]:
    """The prompt's entries, which only the first verdict carries, and one for each committed token."""
    verdicts = [answer.content for answer in answers if answer.content]
    assert all(len(verdict.logprobs) == len(verdict.token_ids) for verdict in verdicts)
    assert len(verdicts[0].prompt_logprobs) == spec.prompt_len - 1
    assert not any(verdict.prompt_logprobs for verdict in verdicts[1:])
    return list(verdicts[0].prompt_logprobs), [entry for verdict in verdicts for entry in verdict.logprobs]


def all_entries(answers: Sequence[SessionAnswer], spec: SessionSpec) -> Entries:
    """The prompt's entries, and those of the committed tokens after them."""
    prompt, output = entries_of(answers, spec)
    return prompt + output


def first_entries(answers: Sequence[SessionAnswer]) -> Entries:
    """The prompt's entries of the first answer."""
    assert answers[0].content is not None
    return list(answers[0].content.prompt_logprobs)


def of_text(runner: ModelRunner, token_ids: Sequence[int]) -> Entries:
    """One entry for each token but the first, of a session whose prompt is the whole text."""
    target = Target(runner)
    target.open(asking(spec_of(token_ids, 600)))
    [answer] = target.run()
    target.table.clear()
    assert answer.content is not None
    return list(answer.content.prompt_logprobs)


def plain_tokens(runner: ModelRunner, spec: SessionSpec) -> list[int]:
    """The tokens of the same request without log-probabilities and proposals."""
    alone = Target(runner)
    alone.open(replace(spec, logprob_count=None, prompt_logprobs=False), budget=spec.max_len)
    alone.run()
    tokens = list(alone.tokens)
    alone.table.clear()
    return tokens
