"""DFlash in a target: blocks of guesses over keys and values that the target's features make, under every rule.

Stories with rollbacks, prefix hits and plain stretches, and their planted faults, are those of all heads: test_heads.
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.basics import check_empty, grid, spec_of
from support.drafting.rules import ruled
from support.heads.block_oracle import BlockOracle
from support.heads.head_oracle import Target
from support.heads.heads import random_block
from support.heads.tiny_heads import dflash
from support.models.engine_cases import kv_state
from support.services.stepped_target import PROMPT, OwnTarget, check_pure, check_storm, plain, storm

from outrider.drafters.drafter import GuessLimits
from outrider.drafters.hosted import HostedDraft, HostedModel, host_head
from outrider.engine.batching import Feed
from outrider.engine.cache import BlockPool
from outrider.engine.heads.checkpoint import read_head
from outrider.engine.models.config import Masks
from outrider.engine.runner import ModelRunner
from outrider.engine.session import Session
from outrider.parameters import Rule, SessionSpec
from outrider.token_tree import TokenTree, TreeShape

pytestmark = pytest.mark.early

SPEC = spec_of(PROMPT, 90, seed=3, eos=(), temperature=1.0)
GREEDY = replace(SPEC, sampling=SPEC.sampling.model_copy(update={"temperature": 0.0}))
RULES = pytest.mark.parametrize("rule", [Rule.MATCH, Rule.BLOCK, *grid(Rule.RATIO)])
CHAIN = GuessLimits(9)


@pytest.fixture
def target(folder: Path) -> Iterator[ModelRunner]:
    runner = ModelRunner.load(str(folder), dtype="float32", kv_tokens=4096)
    yield runner
    check_empty(runner.pool)


def proposed(hosting: HostedModel, draft: HostedDraft, session: Session, limits: GuessLimits = CHAIN) -> TokenTree:
    """A proposal after the tokens of a target's session, all but the last of which are cached."""
    draft.propose(session, limits)
    while draft.proposal is None:
        hosting.advance([draft])
    return draft.proposal.tree


def guessed(
    target: ModelRunner, hosting: HostedModel, tokens: list[int], spec: SessionSpec, limits: GuessLimits = CHAIN
) -> TokenTree:
    """A proposal after these tokens, of sessions of its own."""
    session, draft = target.open(tokens, min(len(tokens), spec.prompt_len)), hosting.open(spec, None)
    try:
        target.forward([Feed(session, without_last=True)])
        return proposed(hosting, draft, session, limits)
    finally:
        draft.free()
        session.free()


@pytest.mark.parametrize("first_row", [0, 1])
def test_guesses_are_those_of_the_oracle(target: ModelRunner, tmp_path: Path, first_row: int) -> None:
    """The likeliest of each row over features of the real target, with the last token's where it was trained to guess;
    and another row's are found.
    """
    parts, tokens = target.parts, [5, 17, 200, 3, 90, *range(100, 114)]
    sizes = {"hidden": parts.hidden_size, "vocab": parts.vocab_size, "ids": (0,), "block_size": 6}
    folder = dflash(tmp_path / "head", sample_from_anchor=not first_row, **sizes)
    head, digest = read_head(folder, parts).load(parts, target.device, torch.float32, target.ops)
    hosting = host_head(target, head, digest)
    chain = guessed(target, hosting, tokens, GREEDY)
    session = target.open(tokens, len(tokens))
    target.forward([Feed(session)])
    known = torch.zeros(parts.num_layers + 1, len(tokens), parts.hidden_size)
    known[1] = target.cache.load_tap(1, torch.from_numpy(session.table.slots(0, len(tokens))))
    session.free()
    arrays = [each.double().numpy() for each in (parts.embedding, parts.output, known)]
    likeliest = BlockOracle(folder, Target(*arrays)).logits(tokens).argmax(1).tolist()
    assert list(chain.token_ids) == likeliest[first_row:]
    assert hosting.runner is not None
    hosting.runner.model.config = replace(hosting.runner.config, masks=Masks(7, 6, 1 - first_row))
    shifted = guessed(target, hosting, tokens, GREEDY, GuessLimits(4))
    assert list(shifted.token_ids) == likeliest[1 - first_row :][:4] != likeliest[first_row:][:4]


@RULES
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_proposal_is_the_beginning_of_a_longer_one(target: ModelRunner, rule: Rule, temperature: float) -> None:
    """A block is computed whole, so a guess depends on its place alone; and no more guesses come than it has."""
    spec = ruled(SPEC if temperature else GREEDY, rule)
    hosting = host_head(target, random_block(target), "")
    longest = guessed(target, hosting, [*PROMPT, 8, 1], spec)
    assert len(longest) == 5
    assert bool(longest.distributions) == rule.needs_distributions
    for count in range(1, 5):
        shorter = guessed(target, hosting, [*PROMPT, 8, 1], spec, GuessLimits(count))
        assert shorter.token_ids == longest.token_ids[:count]
        assert shorter.distributions == longest.distributions[:count]
    tree = guessed(target, hosting, [*PROMPT, 8, 1], spec, GuessLimits(12, TreeShape(), 9))
    assert 5 < len(tree) <= 12 or (rule.needs_distributions and not temperature)
    assert max(tree.depths) <= 5


@RULES
def test_blocks_side_by_side_are_those_alone(target: ModelRunner, rule: Rule) -> None:
    """Sixteen sessions of different lengths in one forward, chains and trees: no bit of a guess or its law changes."""
    spec, hosting = ruled(SPEC, rule), host_head(target, random_block(target), "")
    wishes = [
        ([*PROMPT, *range(1, 1 + 3 * number)], GuessLimits(1 + number % 6, TreeShape() if number % 3 == 0 else None, 9))
        for number in range(16)
    ]
    alone = [guessed(target, hosting, tokens, spec, limits) for tokens, limits in wishes]
    sessions = [target.open(tokens, len(PROMPT)) for tokens, _ in wishes]
    drafts = [hosting.open(spec, None) for _ in wishes]
    target.forward([Feed(session, without_last=True) for session in sessions])
    for draft, session, (_, limits) in zip(drafts, sessions, wishes, strict=True):
        draft.propose(session, limits)
    assert hosting.runner is not None
    before = hosting.runner.forward_counts.batch_sizes.get(16, 0)
    hosting.advance(drafts)
    assert hosting.runner.forward_counts.batch_sizes[16] == before + 1
    assert [draft.proposal and draft.proposal.tree for draft in drafts] == alone
    for each in (*drafts, *sessions):
        each.free()


@pytest.mark.parametrize("is_sound", [True, False])
def test_blocks_are_written_into_no_block_of_another_session(
    target: ModelRunner, monkeypatch: pytest.MonkeyPatch, is_sound: bool
) -> None:
    """A session that goes back into a prefix that it has published leaves it as it was, for who shares it.

    A table that would write wherever it may read is found.
    """
    hosting, salt = host_head(target, random_block(target), ""), b"shared"
    assert hosting.runner is not None
    tokens = [*PROMPT, *range(1, 36)]
    sessions = [target.open(tokens, len(PROMPT)) for _ in range(2)]
    drafts = [hosting.open(SPEC, salt) for _ in sessions]
    for session, draft in zip(sessions, drafts, strict=True):
        target.forward([Feed(session, without_last=True)])
        assert len(proposed(hosting, draft, session)) == 5
    shared = [draft._session.table.shared_blocks if draft._session else () for draft in drafts]
    assert shared[0] == shared[1]
    assert len(shared[0]) == 2
    other = drafts[1]._session
    assert other is not None
    before = [each.clone() for each in kv_state(hosting.runner, other)]
    if not is_sound:
        monkeypatch.setattr(BlockPool, "is_writable", lambda *_: True)
    sessions[0].truncate(20)
    drafts[0].truncate(20)
    assert len(proposed(hosting, drafts[0], sessions[0])) == 5
    pairs = zip(before, kv_state(hosting.runner, other), strict=True)
    assert all(torch.equal(*pair) for pair in pairs) is is_sound
    assert proposed(hosting, drafts[0], sessions[0]) == guessed(target, hosting, tokens[:20], SPEC)
    for each in (*drafts, *sessions):
        each.free()
    check_empty(hosting.runner.pool)


@RULES
@pytest.mark.parametrize("shape", [None, TreeShape(), *grid(TreeShape(expansions=(2, 1)))], ids=repr)
def test_a_storm_leaves_proposals_pure(
    target: ModelRunner, rule: Rule, shape: TreeShape | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After all that can happen to a session they are functions, and under `match` its tokens are plain decoding's."""
    spec, hosting = ruled(SPEC, rule), host_head(target, random_block(target), "")
    own = OwnTarget(target, hosting, shape)
    if shape is not None:
        check_storm(target, hosting, own, spec, shape, monkeypatch)
        return
    said, proposals = storm(own, spec, random.Random(3))
    assert len(proposals) > 5
    if rule is Rule.MATCH:
        tokens = plain(target, spec)
        assert all(each == tokens[: len(each)] for each in said)
    check_pure(target, hosting, spec, proposals)
    own.table.clear()


@pytest.mark.parametrize("spec", [GREEDY, SPEC], ids=["greedy", "sampled"])
@pytest.mark.parametrize("shape", [None, TreeShape()], ids=["chain", "tree"])
def test_no_token_changes(target: ModelRunner, spec: SessionSpec, shape: TreeShape | None) -> None:
    """Asked and unasked, with guesses that are right now and then."""
    hosting, tokens = host_head(target, random_block(target), ""), plain(target, spec)
    for budget in (0, 9):
        own = OwnTarget(target, hosting, shape)
        answers = own.to_the_end(spec, 4, budget)
        assert own.tokens == tokens
        assert sum(len(answer.content.hosted.tree) for answer in answers) > 100
        own.table.clear()


def test_penalties_and_bans_hold_among_the_guesses(target: ModelRunner) -> None:
    """Though no row of a block knows the guesses before it."""
    hosting = host_head(target, random_block(target), "")
    sampling = GREEDY.sampling.model_copy(update={"frequency_penalty": 2.0, "presence_penalty": 2.0})
    penalised = guessed(target, hosting, [*PROMPT], replace(GREEDY, sampling=sampling)).token_ids
    assert len(set(penalised)) == len(penalised) == 5
    free = guessed(target, hosting, [*PROMPT], GREEDY).token_ids
    banned = guessed(target, hosting, [*PROMPT], replace(GREEDY, banned=(free[:2],))).token_ids
    assert banned[0] == free[0]
    assert banned[1] != free[1]
