"""Rounds that are tried and taken back, and counted: every rule guesses and decides after the same tokens.

The texts are the target's own, at the temperature that is measured, because a draft is asked about nothing else.
Drafts, distributions, noise and decisions are the services' own functions; there is no message and no clock. Nothing
that a round accepts is committed, so that two rules are compared in the same places and not along two texts.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from outrider.cli.bench.common import spec_of
from outrider.drafters.drafter import GuessLimits
from outrider.drafters.hosted import HostedDraft, HostedModel
from outrider.engine.batching import Feed
from outrider.engine.runner import ModelRunner
from outrider.engine.sampling.draft_distribution import DEFAULT_TOP_N
from outrider.engine.sampling.draw import DrawInput
from outrider.engine.session import Session
from outrider.engine.walk import Walk
from outrider.errors import CacheFull, OutriderError
from outrider.estimates.timing import ComputeTimes
from outrider.parameters import Acceptance, Rule, SessionSpec
from outrider.rpc.fencing import Fence
from outrider.rpc.messages.round import fence_message, times_message
from outrider.rpc.messages.tree import tree_message
from outrider.token_tree import EMPTY, TokenTree
from outrider.v1 import draft_service_pb2 as draft_pb
from outrider.v1 import target_service_pb2 as target_pb
from target_service.acceptance import decide

RULES = (
    Acceptance(rule=Rule.MATCH),
    Acceptance(rule=Rule.RATIO),
    Acceptance(rule=Rule.BLOCK),
    Acceptance(rule=Rule.LENIENT, lenience=0.5),
    Acceptance(rule=Rule.TYPICAL),
)
TOP_NS = (8, 16, 32, 64, 128, 256)
# Sessions of one forward: their rows together stay below what a runner computes at once.
AT_A_TIME = 25

# Of the length and size that they have in a live system.
SESSION_ID = bytes(range(16))
INSTANCE_ID = 2**64 - 1
NUMERICS_ID = "cpu-bfloat16-native-v4"
TIMES = ComputeTimes(queue_us=999, compute_us=99_999, forward_count=9, row_count=99)


@dataclass(frozen=True, slots=True)
class ModelPair:
    """Two models with room for the sessions of a run, each rule's own ones of the draft."""

    target: ModelRunner
    draft: HostedModel


Trial = tuple[TokenTree, Walk]
"""One round: what was proposed, and the walk that the target made of it."""


class Readers:
    """Both models at the same places of some texts, which the target writes itself."""

    def __init__(self, pair: ModelPair, prompts: Sequence[Sequence[int]], temperature: float, text_len: int) -> None:
        """Writes text_len tokens after every prompt, ends of sequence ignored; prompt i has the seed i."""
        self._pair = pair
        # With room after the last place for guesses that are never committed.
        room = 2 * text_len
        self.specs = [spec_of(prompt, seed, temperature, room) for seed, prompt in enumerate(prompts)]
        self._target = [opened(pair.target, prompt) for prompt in prompts]
        # By rule, because that is what a draft draws for.
        self._drafts: dict[Acceptance, list[HostedDraft]] = {}
        for _ in range(text_len):
            trials = self._decide(self.specs, [EMPTY] * len(prompts))
            for session, (_, walk) in zip(self._target, trials, strict=True):
                session.extend([walk.next_token_id])
        self.texts = [tuple(session.token_ids) for session in self._target]

    @property
    def lengths(self) -> list[int]:
        """Committed tokens of every session."""
        return [len(session) for session in self._target]

    def go_to(self, place: int) -> None:
        """Makes every session hold its prompt and the first `place` tokens of its text."""
        for number, (spec, text, session) in enumerate(zip(self.specs, self.texts, self._target, strict=True)):
            length = spec.prompt_len + place
            session.replace_tail(1, text[1:length])
            for drafts in self._drafts.values():
                drafts[number].truncate(length)

    def round(self, acceptance: Acceptance, draft_count: int, top_n: int) -> list[Trial]:
        """Makes one round of every session, from its place and back to it."""
        pair, specs = self._pair, [replace(spec, acceptance=acceptance) for spec in self.specs]
        drafts = self._drafts.setdefault(acceptance, [pair.draft.open(spec, None) for spec in specs])
        model = HostedModel(pair.draft.runner, top_n, pair.draft.copy)
        for draft, session in zip(drafts, self._target, strict=True):
            if session.cached_len < len(session) - 1:
                pair.target.forward([Feed(session, without_last=True)])
            draft.propose(session, GuessLimits(draft_count))
        while waiting := [draft for draft in drafts if draft.proposal is None]:
            model.advance(waiting)
        trees = [draft.proposal.tree for draft in drafts if draft.proposal is not None]
        if not all(trees):
            # Nothing may fail in a measurement; a full pool is a run that was planned wrongly.
            raise CacheFull("a draft had no room for its guesses")
        return self._decide(specs, trees)

    def close(self) -> None:
        """Gives back what the sessions hold."""
        for session in self._target:
            session.free()
        for draft in chain.from_iterable(self._drafts.values()):
            draft.free()

    def _decide(self, specs: Sequence[SessionSpec], trees: Sequence[TokenTree]) -> list[Trial]:
        inputs = zip(self._target, trees, specs, strict=True)
        asks = [DrawInput(Feed(session, tree), spec) for session, tree, spec in inputs]
        result = self._pair.target.forward([ask.feed for ask in asks])
        trials = []
        walks = decide(self._pair.target, asks, result.logits, [rows or range(0) for rows in result.ranges])
        for tree, walk in zip(trees, walks, strict=True):
            if isinstance(walk, OutriderError):
                raise walk
            trials.append((tree, walk))
        return trials


def opened(runner: ModelRunner, token_ids: Sequence[int]) -> Session:
    """A session whose tokens are cached, so that what follows fits into one forward."""
    session = runner.open(token_ids, len(token_ids))
    while session.cached_len < len(session):
        runner.forward([Feed(session)])
    return session


def hop_bytes(tree: TokenTree, base_len: int) -> int:
    """Bytes of the larger hop, request and answer together, of a round that proposes a tree after base_len tokens.

    All of the tree is accepted, and so was all of the round before. Each message has a frame of its link to itself.
    """
    request = Fence(SESSION_ID, 9, base_len)
    fence = fence_message(request)
    proposal, times = tree_message(tree), times_message(TIMES)
    tokens = (*tree.token_ids, *tree.token_ids[-1:])
    verdict = target_pb.Verdict(
        accepted_rows=range(1, len(tree) + 1), next_token_id=tokens[-1], evaluated_count=len(tree)
    )
    advance = draft_pb.DraftAdvance(token_ids=tokens, draft_count=len(tree))
    step = target_pb.TargetStep(proposal=proposal, plain_budget=len(tree))
    advancing = draft_pb.ProposeRequest(fence=fence, advance=advance)
    proposed = draft_pb.ProposeResponse(fence=fence, proposal=proposal, cached_len=base_len, times=times)
    stepping = target_pb.VerifyRequest(fence=fence, step=step)
    decided = target_pb.VerifyResponse(fence=fence, verdict=verdict, cached_len=base_len, times=times)
    sender: dict[str, Any] = {"instance_id": INSTANCE_ID, "numerics_id": NUMERICS_ID}
    draft_bytes = draft_pb.DraftServiceLinkRequest(requests=[advancing]).ByteSize()
    draft_bytes += draft_pb.DraftServiceLinkResponse(responses=[proposed], **sender).ByteSize()
    target_bytes = target_pb.TargetServiceLinkRequest(requests=[stepping]).ByteSize()
    target_bytes += target_pb.TargetServiceLinkResponse(responses=[decided], **sender).ByteSize()
    return max(draft_bytes, target_bytes)


@dataclass(frozen=True, slots=True)
class AcceptancePlan:
    """One run: texts of text_len tokens after every prompt, and rounds at every stride-th token of them."""

    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    draft_count: int = 5
    text_len: int = 96
    stride: int = 4
    rules: tuple[Acceptance, ...] = RULES
    top_n: int = DEFAULT_TOP_N
    """Most tokens of a draft's distribution where it is not what is compared."""
    top_ns: tuple[int, ...] = TOP_NS

    @property
    def places(self) -> range:
        """Token counts of a text after which there are rounds."""
        return range(0, self.text_len - self.draft_count, self.stride)

    def settings(self, temperature: float) -> list[tuple[Acceptance, int]]:
        """Rules with the size of a draft's distribution; at temperature 0 that is one token in any case."""
        settings = [(acceptance, self.top_n) for acceptance in self.rules]
        if temperature:
            ratio = Acceptance(rule=Rule.RATIO)
            settings += [(ratio, top_n) for top_n in self.top_ns if top_n != self.top_n]
        return settings


@dataclass(frozen=True, slots=True)
class RuleCounts:
    """All rounds of one prompt under one setting. Draft tokens are evaluated up to the first that is not accepted."""

    temperature: float
    rule: str
    top_n: int
    prompt: int
    rounds: int
    accepted: int
    evaluated: int
    hop_bytes: int
    most_hop_bytes: int


def measure(
    pair: ModelPair, plan: AcceptancePlan, prompts: Sequence[Sequence[int]], tell: Callable[[str], None]
) -> list[RuleCounts]:
    """Runs the plan; prompts are token ids."""
    counts: list[RuleCounts] = []
    for temperature in plan.temperatures:
        for first in range(0, len(prompts), AT_A_TIME):
            part = prompts[first : first + AT_A_TIME]
            tell(f"Temperature {temperature:g}, texts {first + 1} to {first + len(part)} of {len(prompts)}.")
            readers = Readers(pair, part, temperature, plan.text_len)
            counts += _counted(readers, plan, temperature, first)
            readers.close()
    return counts


def _counted(readers: Readers, plan: AcceptancePlan, temperature: float, first: int) -> Iterator[RuleCounts]:
    """Counts of all settings in the same places, text by text."""
    by_setting: dict[tuple[Acceptance, int], list[list[tuple[Trial, int]]]] = {}
    for place in plan.places:
        readers.go_to(place)
        for acceptance, top_n in plan.settings(temperature):
            trials = readers.round(acceptance, plan.draft_count, top_n)
            by_setting.setdefault((acceptance, top_n), []).append(list(zip(trials, readers.lengths, strict=True)))
    for (acceptance, top_n), by_place in by_setting.items():
        for number, rounds in enumerate(zip(*by_place, strict=True), start=first):
            sizes = [hop_bytes(tree, base_len) for (tree, _), base_len in rounds]
            yield RuleCounts(
                temperature,
                name_of(acceptance),
                top_n,
                number,
                rounds=len(rounds),
                accepted=sum(len(walk.accepted_rows) for (_, walk), _ in rounds),
                evaluated=sum(walk.evaluated_count for (_, walk), _ in rounds),
                hop_bytes=sum(sizes),
                most_hop_bytes=max(sizes),
            )


def name_of(acceptance: Acceptance) -> str:
    """A rule with its settings, for instance "lenient 0.5"."""
    return " ".join((acceptance.rule, *(f"{value:g}" for value in acceptance.settings.values())))
