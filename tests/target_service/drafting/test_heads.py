"""Heads that read the target's features, in the places where other engines went wrong; each fault is planted once."""

import asyncio
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.basics import check_empty, spec_of
from support.heads.heads import random_block, random_head
from support.heads.tiny_chains import CHAINS, VOCAB, write_chain
from support.models.tiny_models import write_tiny_model
from support.observability import families
from support.services.session_clients import channel_to
from support.services.stepped_target import PROMPT, OwnTarget, Proposals, check_pure, plain
from torch import Tensor

from outrider.drafters import hosted
from outrider.drafters.drafter import Drafter, GuessLimits
from outrider.drafters.hosted import FeatureCopy, HostedDraft, host_head
from outrider.engine.batching import Feed
from outrider.engine.cache import KVCache, Slots
from outrider.engine.heads.block_head import BlockHead
from outrider.engine.heads.checkpoint import HEAD_FILES
from outrider.engine.heads.decoder import HeadDecoder
from outrider.engine.heads.feature_head import FeatureHead, Fuse
from outrider.engine.heads.head import Head, HeadRows
from outrider.engine.runner import ModelRunner
from outrider.engine.session import Session
from outrider.model_service.settings import Dtype
from outrider.parameters import SessionSpec
from outrider.rpc.fencing import Fence
from outrider.token_tree import TokenTree
from outrider.v1 import model_service_pb2 as model_pb
from outrider.v1.model_service_pb2_grpc import ModelServiceStub
from target_service.server import TargetSettings, start

SPEC = spec_of(PROMPT, 90, seed=3, eos=(), temperature=1.0)
BUSHY = TokenTree(token_ids=(11, 22, 33, 44, 55, 66, 77, 88), parents=(0, 0, 1, 1, 2, 5, 6, 3))


@pytest.fixture
def target(folder: Path) -> Iterator[ModelRunner]:
    runner = ModelRunner.load(str(folder), dtype="float32", kv_tokens=4096)
    yield runner
    check_empty(runner.pool)


class Story:
    """One session, its tokens and all that its head proposed."""

    def __init__(self, runner: ModelRunner, hosting: Drafter) -> None:
        self.own = OwnTarget(runner, hosting)
        self.proposals: Proposals = []

    def take(self) -> None:
        for answer in self.own.run():
            if answer.content.hosted.tree:
                self.proposals.append((self.own.tokens[: answer.fence.base_len], answer.content.hosted.tree))

    def ask(self, spec: SessionSpec, count: int = 3, epoch: int = 1) -> None:
        self.own.ask(spec, count, epoch=epoch)
        self.take()

    def go_on(self, *counts: int, epoch: int = 1, tree: TokenTree | None = None) -> None:
        for count in counts:
            self.own.go_on(count, 0, epoch, tree or TokenTree())
            self.take()


def guesses_that_are_right(runner: ModelRunner, hosting: Drafter) -> Iterator[Story]:
    """Of three guesses none, one and all are kept: drafts take the words of plain decoding, or others."""
    tokens = plain(runner, SPEC)
    story = Story(runner, hosting)
    story.ask(SPEC)
    for right in (3, 0, 1, 3, 2, 3):
        at = len(story.own.tokens)
        said = [token if place < right else (token + 1) % 257 for place, token in enumerate(tokens[at : at + 3])]
        story.go_on(0, tree=TokenTree.chain(said))
        story.go_on(5)
    # Its own are right now and then, too.
    story.go_on(*[5] * 15)
    yield story


def rows_of_a_bushy_tree(runner: ModelRunner, hosting: Drafter) -> Iterator[Story]:
    """What the target has accepted lies in other rows than those after its tokens."""
    tokens = plain(runner, SPEC)
    story = Story(runner, hosting)
    story.ask(SPEC)
    at = len(story.own.tokens)
    said = dict(zip((2, 5, 6, 7), tokens[at : at + 4], strict=True))
    ids = tuple(said.get(row, 256 - row) for row in range(1, 9))
    story.go_on(0, tree=TokenTree(token_ids=ids, parents=BUSHY.parents))
    assert len(story.own.tokens) == at + 5
    story.go_on(5, 3)
    yield story


def plain_stretches(runner: ModelRunner, hosting: Drafter) -> Iterator[Story]:
    """Forty tokens without a guess, before and after which there are some."""
    story = Story(runner, hosting)
    story.ask(SPEC)
    story.go_on(5, *[0] * 40, 5, 1, 5)
    yield story


def shared_beginnings(runner: ModelRunner, hosting: Drafter) -> Iterator[Story]:
    """Texts that are the same up to the end of a block, and up to a place within one, and then differ."""
    first = Story(runner, hosting)
    first.ask(SPEC)
    first.go_on(*[2] * 30)
    yield first
    for length, other in ((16, 4), (32, 5), (40, 6), (48, 7)):
        story = Story(runner, hosting)
        prompt = (*first.own.tokens[:length], other, 9, 9)
        story.ask(replace(SPEC, token_ids=prompt, prompt_len=len(prompt), max_len=90))
        story.go_on(5, 2)
        yield story


def reopened_sessions(runner: ModelRunner, hosting: Drafter) -> Iterator[Story]:
    """A target takes the session up from its tokens, or goes back, or has lost what was cached."""
    story = Story(runner, hosting)
    story.ask(SPEC)
    story.go_on(3, 3, 3)
    story.ask(replace(SPEC, token_ids=tuple(story.own.tokens)), 5, epoch=2)
    story.go_on(5, 5, epoch=2)
    story.own.sessions.rollback(Fence(story.own.session_id, 3, 9))
    story.go_on(5, 0, 5, epoch=3)
    story.own.held.session.free()
    story.go_on(5, epoch=3)
    yield story
    # Wherever guesses were asked for, there were some.
    assert len(story.proposals) == 9


STORIES = (
    guesses_that_are_right,
    rows_of_a_bushy_tree,
    plain_stretches,
    shared_beginnings,
    reopened_sessions,
)
Stories = Callable[[ModelRunner, Drafter], Iterator[Story]]


def tell(runner: ModelRunner, stories: Stories, make: Callable[[ModelRunner], Head], max_rows: int = 512) -> None:
    """Asserts that every proposal of the stories is a fresh session's; whatever happens, nothing is left."""
    hosting = host_head(runner, make(runner), "")
    assert hosting.runner is not None
    # Memory that was not written may still hold the right states, keys and values, of the test before.
    cache = hosting.runner.cache
    for kept in (cache.features, *cache.keys, *cache.values):
        kept.normal_(0, 3, generator=torch.Generator().manual_seed(1))
    cache.features[:, -1] = 0
    told: list[Story] = []
    runner.max_rows = max_rows
    try:
        told += stories(runner, hosting)
        runner.max_rows = 512
        for story in told:
            assert story.proposals
            check_pure(runner, hosting, SPEC, story.proposals)
    finally:
        for story in told:
            story.own.table.clear()


@pytest.mark.parametrize("make", [random_head, random_block])
@pytest.mark.parametrize("max_rows", [512, 12])
@pytest.mark.parametrize("stories", STORIES)
def test_proposals_are_those_of_fresh_sessions(
    target: ModelRunner, stories: Stories, max_rows: int, make: Callable[[ModelRunner], Head]
) -> None:
    """In whatever pieces a text was read, of heads with states, and of blocks over keys and values of features."""
    tell(target, stories, make, max_rows)


def _keep_guessed_rows(patch: pytest.MonkeyPatch) -> None:
    def follow(draft: HostedDraft, token_ids: list[int]) -> Session:
        copy, draft._copy = draft._copy, None
        try:
            return real(draft, token_ids)
        finally:
            draft._copy = copy

    real = HostedDraft._follow
    patch.setattr(HostedDraft, "_follow", follow)


def _leave_features_behind(patch: pytest.MonkeyPatch) -> None:
    def copy(cache: KVCache, source: Slots, destination: Slots) -> None:
        features, cache.features = cache.features, cache.features[:, :0]
        real(cache, source, destination)
        cache.features = features

    real = KVCache.copy
    patch.setattr(KVCache, "copy", copy)


def _forget_plain_stretches(patch: pytest.MonkeyPatch) -> None:
    real = FeatureCopy.__call__
    patch.setattr(
        FeatureCopy, "__call__", lambda copy, source, own, start, end: real(copy, source, own, max(start, end - 4), end)
    )


def _publish_guessed_states(patch: pytest.MonkeyPatch) -> None:
    task = hosted.DraftTask
    patch.setattr(hosted, "DraftTask", lambda **fields: task(**fields | {"num_private": 0}))


def _read_features_too_early(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HostedDraft, "reads_features", property(lambda draft: False))


def _begin_each_piece_at_its_own_start(patch: pytest.MonkeyPatch) -> None:
    real = BlockHead.keep
    patch.setattr(BlockHead, "keep", lambda head, features, first, slots, cache: real(head, features, 0, slots, cache))


Fault = Callable[[pytest.MonkeyPatch], None]
FAULTS: dict[str, tuple[Fault, Stories]] = {
    "rows of right guesses are kept": (_keep_guessed_rows, guesses_that_are_right),
    "features stay where rows were": (_leave_features_behind, rows_of_a_bushy_tree),
    "a plain stretch is skipped": (_forget_plain_stretches, plain_stretches),
    "a block ends with a guessed state": (_publish_guessed_states, shared_beginnings),
    "features are read before they are there": (_read_features_too_early, reopened_sessions),
}


# Nothing that stands on guesses has states in a block's cache, so there are none to keep.
BLOCK_FAULTS = {name: fault for name, fault in FAULTS.items() if fault[1] is not guesses_that_are_right} | {
    "positions begin where a piece does": (_begin_each_piece_at_its_own_start, plain_stretches)
}


@pytest.mark.parametrize(
    ("make", "plant", "stories"),
    [
        *(pytest.param(random_head, *fault, id=name) for name, fault in FAULTS.items()),
        *(pytest.param(random_block, *fault, id=f"block: {name}") for name, fault in BLOCK_FAULTS.items()),
    ],
)
def test_a_fault_would_be_seen(
    target: ModelRunner,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[ModelRunner], Head],
    plant: Fault,
    stories: Stories,
) -> None:
    """Each of these made another engine slower, and it went unnoticed."""
    plant(monkeypatch)
    with pytest.raises((AssertionError, ValueError)):
        tell(target, stories, make)


def test_a_token_stands_with_the_state_before_it(target: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row j reads token j and what the target knew at j - 1; a guess, what the head made of the row before."""
    head = random_head(target)
    # Only heads with weights for so many depths are told of them.
    head.facts = replace(head.facts, max_draft_count=9)
    steps: list[tuple[HeadRows, Tensor]] = []

    def recorded(rows: HeadRows) -> tuple[Tensor, Tensor]:
        outputs, states = FeatureHead.step(head, rows)
        steps.append((rows, states))
        return outputs, states

    monkeypatch.setattr(head, "step", recorded)
    monkeypatch.setattr(hosted, "head_decoder", HeadDecoder)
    story = Story(target, host_head(target, head, ""))
    story.ask(SPEC, 0)
    story.go_on(0, 0, 0, 3, 3)
    tokens = story.own.tokens
    session = target.open(tokens, len(tokens))
    target.forward([Feed(session)])
    true_states = head.states_of(target.cache.features[session.table.slots(0, len(tokens))])
    behind = torch.zeros(0)
    for rows, states in steps:
        for row, (token_id, position) in enumerate(zip(rows.plan.token_ids, rows.plan.positions, strict=True)):
            if rows.depths[row]:
                assert torch.equal(rows.states[row], behind)
            else:
                assert int(token_id) == tokens[position]
                assert position == 0 or torch.equal(rows.states[row], true_states[position - 1])
        behind = states[-1]
    depths = [list(rows.depths) for rows, _ in steps]
    # Nine tokens to read at first, then guesses; then what has been committed meanwhile.
    assert depths[:3] == [[0] * 9, [1], [2]]
    assert set(depths[3]) == {0}
    session.free()
    story.own.table.clear()


async def test_a_service_says_what_its_head_is_and_holds(tmp_path: Path) -> None:
    """By GetModelInfo and its metrics: name, digest and weights, and the blocks that sessions of its own cache hold."""
    model = write_tiny_model(tmp_path / "model", "llama", vocab_size=VOCAB)
    head = write_chain(tmp_path / "head", CHAINS["medusa-shared"]())
    running = await start(
        TargetSettings(str(model), "127.0.0.1:0", head=str(head), dtype=Dtype.FLOAT32, metrics_listen="127.0.0.1:0")
    )
    try:
        async with channel_to(running.address) as channel:
            info = await ModelServiceStub(channel).GetModelInfo(model_pb.GetModelInfoRequest())
        [offer] = info.drafter_offers
        assert (offer.name, offer.model_name, len(offer.model_hash)) == ("medusa", "medusa", 32)
        assert offer.weight_bytes == 4 * sum(tensor.numel() for tensor in load_file(head / HEAD_FILES[0]).values())
        assert offer.block_count == offer.free_block_count == info.block_count
        assert offer.row_costs
        assert running.metrics is not None
        answer = await asyncio.to_thread(urllib.request.urlopen, f"http://{running.metrics.address}/metrics")
        found = families(answer.read().decode())["outrider_drafter_kv_blocks_free"].samples
        assert [(each.labels["drafter"], each.value) for each in found] == [("medusa", info.block_count)]
    finally:
        await running.stop(0)


@pytest.mark.parametrize("make", [random_head, random_block])
def test_nothing_is_guessed_past_the_head_s_positions(target: ModelRunner, make: Callable[..., Head]) -> None:
    """A text that grows past them goes on plainly; a block is never cut, and so ends where its last mask would lie."""
    hosting = host_head(target, make(target, context_len=24), "")
    story = Story(target, hosting)
    story.ask(SPEC)
    while story.own.held.finish_reason is None:
        story.go_on(4)
    lengths = [len(before) + len(tree) for before, tree in story.proposals]
    if make is random_head:
        assert max(lengths) == 24
    else:
        assert 19 < max(lengths) <= 24
        assert max(len(before) for before, _ in story.proposals) <= 24 - 5
    story.own.table.clear()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="NO CUDA DEVICE: no test of heads on a GPU here")
@pytest.mark.parametrize("make", [*(partial(random_head, fuse=fuse) for fuse in Fuse), random_block])
def test_a_head_on_a_gpu_guesses_what_it_guesses_on_the_cpu(folder: Path, make: Callable[..., Head]) -> None:
    """The first guess after the same tokens in float32, for nearly all of twenty texts: rounding may turn a tie."""
    found = []
    for device in ("cpu", "cuda:0"):
        runner = ModelRunner.load(str(folder), dtype="float32", kv_tokens=4096, device=device)
        hosting, guesses = host_head(runner, make(runner), ""), []
        for text in range(20):
            session, draft = runner.open([*PROMPT, text, 7, text + 1], 5), hosting.open(SPEC, None)
            runner.forward([Feed(session, without_last=True)])
            draft.propose(session, GuessLimits(3))
            while draft.proposal is None:
                hosting.advance([draft])
            assert len(draft.proposal.tree) == 3
            guesses.append(draft.proposal.tree.token_ids[0])
            draft.free()
            session.free()
        found.append(guesses)
    assert sum(ours == theirs for ours, theirs in zip(*found, strict=True)) >= 18


@pytest.mark.slow
def test_penalties_see_the_guesses_so_far(target: ModelRunner) -> None:
    """Tokens are those of plain decoding, and a guess is drawn as the target would after the same text."""
    sampling = SPEC.sampling.model_copy(update={"repetition_penalty": 1.8, "presence_penalty": 0.7})
    spec = replace(SPEC, sampling=sampling)
    hosting = host_head(target, random_head(target), "")
    story = Story(target, hosting)
    story.ask(spec)
    while story.own.held.finish_reason is None:
        story.go_on(4)
    said = list(story.own.tokens)
    check_pure(target, hosting, spec, story.proposals)
    story.own.table.clear()
    assert said == plain(target, spec)
