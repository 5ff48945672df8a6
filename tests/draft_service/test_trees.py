"""Trees through the draft's sessions: exact with the real target, pure after storms, mixed with chains."""

import functools
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from support.basics import check_empty, spec_of
from support.drafting.rules import ruled
from support.models.engine_cases import assert_like_fresh
from support.models.tiny_models import TARGET, TRAINED
from support.services.session_clients import DraftClient, channel_to
from support.services.stepped_draft import PROMPT, SPEC, Draft, continued, fresh_guesses, fresh_tree
from support.services.stepped_target import Target, plain

from draft_service.server import DraftSettings, start
from draft_service.states import Wanted
from outrider.drafters.model_drafter import MODEL, SAMPLED, noise_of
from outrider.drafters.scales import FIRST_SCALES, Ranks, Scales
from outrider.engine.growth import static_shape
from outrider.engine.runner import ModelRunner
from outrider.errors import InvalidRequest
from outrider.parameters import Rule, SamplingParameters, SessionSpec
from outrider.rpc.fencing import Fence
from outrider.rpc.messages.tree import tree_from
from outrider.token_tree import TreeShape
from outrider.v1 import types_pb2 as pb

SHAPES = [
    *(TreeShape(max_children=count) for count in (1, 2, 4, 8)),
    TreeShape(max_depth=2),
    TreeShape(expansions=(2, 2, 1)),
    TreeShape(max_width=1),
    TreeShape(max_width=2, max_children=3),
    TreeShape(is_static=True),
    TreeShape(is_static=True, max_width=2, max_depth=4),
]
MAX_LEN = 48


@functools.cache
def embedded() -> tuple[ModelRunner, ModelRunner]:
    """The embedded target and its draft, loaded once."""
    return ModelRunner.load(str(TARGET), kv_tokens=2048), ModelRunner.load(str(TRAINED), kv_tokens=2048)


@pytest.fixture
def pair() -> Iterator[tuple[Target, Draft]]:
    """Both ends of a request, without what stands between them."""
    runners = embedded()
    target, draft = Target(runners[0], prefix_cache=False), Draft(runners[1], prefix_cache=False)
    yield target, draft
    for table, runner in ((target.table, runners[0]), (draft.table, runners[1])):
        table.clear()
        check_empty(runner.pool)


def shape_of(chance: random.Random) -> TreeShape | None:
    return chance.choice([None, *SHAPES])


def run(target: Target, draft: Draft, spec: SessionSpec, chance: random.Random, drafter: str = "model") -> list[int]:
    """A request to its end, each round with a shape of its own; returns how many guesses each round kept."""
    kept: list[int] = []
    draft.open(spec, 7, shape=shape_of(chance), drafter=drafter)
    target.open(spec, tree=draft.tree())
    while True:
        for answer in target.run():
            verdict = answer.content
            if verdict.finish_reason is not None:
                return kept
            kept.append(len(verdict.accepted_rows))
            length = len(target.tokens)
            draft.advance(1, length, verdict.token_ids, chance.choice((6, 7, 12)), shape_of(chance))
            target.step(1, length, draft.tree())


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_trees_change_no_token(
    pair: tuple[Target, Draft], shape: TreeShape, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever shape is asked for, the target commits what plain decoding commits, and keeps guesses."""
    target, draft = pair
    monkeypatch.setitem(globals(), "shape_of", lambda _chance: shape)
    spec = spec_of(PROMPT, MAX_LEN, seed=3, eos=(), temperature=temperature)
    kept = run(target, draft, spec, random.Random(1))
    assert target.tokens == plain(target.runner, spec)
    assert max(kept) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("rule", [Rule.MATCH, Rule.TYPICAL])
def test_random_shapes_change_no_token(pair: tuple[Target, Draft], seed: int, rule: Rule) -> None:
    """Chains and trees by turns under any sampling; under typical at least every proposal is a sound one."""
    target, draft = pair
    chance = random.Random(seed)
    sampling = SamplingParameters(
        temperature=chance.choice((0.0, 0.7, 1.0)),
        top_p=chance.choice((1.0, 0.9)),
        repetition_penalty=chance.choice((1.0, 1.2)),
    )
    spec = replace(ruled(spec_of(PROMPT, MAX_LEN, seed=seed, eos=(0,)), rule), sampling=sampling)
    drafter = SAMPLED if seed % 3 == 2 else "model"
    run(target, draft, spec, chance, drafter)
    assert len(target.tokens) > len(PROMPT)
    if rule is Rule.MATCH:
        assert target.tokens == plain(target.runner, replace(spec, sampling=sampling))


def test_what_was_accepted_is_not_computed_again(pair: tuple[Target, Draft]) -> None:
    """A path of the tree that was expanded stays cached, off the first chain too, as a fresh prefill has it."""
    _, draft = pair
    spec = spec_of(PROMPT, MAX_LEN, seed=3, eos=(), temperature=1.0)
    draft.open(spec, 12, shape=TreeShape())
    tree = draft.tree()
    grown = draft.held.session.tree
    row = max(range(1, len(grown) + 1), key=lambda each: (grown.depths[each], each))
    path = [grown.token_ids[step - 1] for step in grown.path(row)]
    assert grown.depths[row] >= 2
    draft.advance(1, len(PROMPT) + len(path) + 1, [*path, 77], 5, TreeShape())
    assert draft.held.session.cached_len == len(PROMPT) + len(path)
    [answer] = draft.run()
    assert answer.content.values
    assert answer.cached_len == len(PROMPT) + len(path) + 1
    draft.held.session.follow(())
    assert_like_fresh(draft.runner, draft.held.session)
    assert len(tree) == 12


@pytest.mark.slow
@pytest.mark.parametrize("rule", [Rule.MATCH, Rule.RATIO, Rule.BLOCK])
@pytest.mark.parametrize("seed", range(5))
def test_trees_are_pure_after_storms(draft: Draft, rule: Rule, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Advances, rollbacks, openings and lost caches later a proposal is that of a new session, bit for bit."""
    monkeypatch.setattr(Scales, "learn", lambda *_arguments: None)
    monkeypatch.setattr(Ranks, "learn", lambda *_arguments: None)
    chance, spec, epoch = random.Random(seed), ruled(SPEC, rule), 1
    tokens = list(PROMPT)
    draft.open(spec, 6, shape=TreeShape())
    tree = draft.tree()
    for _ in range(25):
        event, shape, count = chance.randrange(5), shape_of(chance), chance.choice((1, 7, 12))
        if event == 0 or len(tokens) > 40:
            epoch += 1
            del tokens[chance.randrange(len(PROMPT), len(tokens) + 1) :]
            draft.sessions.rollback(draft.fence(epoch, len(tokens)))
            draft.advance(epoch, len(tokens), [], count, shape)
        elif event == 1:
            epoch += 1
            draft.open(replace(spec, token_ids=tuple(tokens)), count, epoch, shape)
        else:
            if event == 2:
                draft.held.session.free()
            # Down the tree as far as chance leads, and then aside.
            row, added = 0, []
            while (children := tree.children(row)) and chance.random() < 0.7:
                row = chance.choice(children)
                added.append(tree.token_ids[row - 1])
            tokens += [*added, chance.randrange(257)]
            draft.advance(epoch, len(tokens), tokens[-len(added) - 1 :], count, shape)
        for _ in range(chance.randrange(3)):
            draft.step()
        is_overtaken = draft.held.task is not None and chance.random() < 0.3
        if is_overtaken:
            # Such a request is answered with what there is.
            draft.held.task.finish()
        tree = draft.tree()
        if not is_overtaken:
            assert tree == fresh_tree(draft.runner, replace(spec, token_ids=tuple(tokens)), count, shape)


def test_chains_and_trees_share_a_forward(draft: Draft) -> None:
    """Six sessions of every kind at once: each proposal is what the session proposes alone."""
    kinds: list[tuple[SessionSpec, TreeShape | None]] = [
        (SPEC, None),
        (SPEC, TreeShape()),
        (replace(SPEC, sampling=SamplingParameters(temperature=0.0)), TreeShape(max_children=3)),
        (ruled(SPEC, Rule.RATIO), TreeShape(expansions=(3, 2))),
        (ruled(SPEC, Rule.BLOCK), None),
        (continued(SPEC, [9, 8, 7]), TreeShape(max_depth=2)),
    ]
    for number, (spec, shape) in enumerate(kinds):
        fence = Fence(bytes([number] * 16), 1, len(spec.token_ids))
        draft.sessions.open(fence, spec, Wanted(9, 0, shape), draft.answers)
    found = {answer.fence.session_id[0]: answer for answer in draft.run()}
    for number, (spec, shape) in enumerate(kinds):
        assert found[number].content == fresh_tree(draft.runner, spec, 9, shape)
    assert found[0].content.token_ids == fresh_guesses(draft.runner, SPEC, 9)


def test_a_repeated_request_is_answered_with_the_same_tree(draft: Draft) -> None:
    """Once more and without a second effect, after open and after advance."""
    draft.open(SPEC, 6, shape=TreeShape())
    first = draft.tree()
    draft.open(SPEC, 6, shape=TreeShape())
    assert draft.tree() == first
    draft.advance(1, 6, [9], 6, TreeShape())
    second = draft.tree()
    draft.advance(1, 6, [9], 6, TreeShape())
    assert draft.tree() == second


def test_a_step_that_fails_for_one_task_is_made_again_for_the_others(
    draft: Draft, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward whose draws were lost has changed nothing that the next one builds on."""
    expected = fresh_tree(draft.runner, SPEC, 9, TreeShape())
    draft.open(SPEC, 9, shape=TreeShape())
    draft.step()
    rank = draft.runner.ops.rank
    failing = iter([True])

    def sometimes(*arguments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if next(failing, False):
            raise RuntimeError("lost")
        return rank(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(draft.runner.ops, "rank", sometimes)
    with pytest.raises(RuntimeError, match="lost"):
        draft.step()
    assert draft.tree() == expected


def test_the_draft_learns_from_what_follows(draft: Draft) -> None:
    """First children that are always right make it surer, ones that are always wrong less sure."""
    for right in (True, False):
        made = Draft(draft.runner)
        made.open(SPEC, 3, shape=TreeShape())
        length = len(PROMPT)
        for _ in range(30):
            tree = made.tree()
            token = tree.token_ids[0] if right else (tree.token_ids[0] + 1) % 257
            length += 1
            made.advance(1, length, [token], 3, TreeShape())
        made.run()
        scale = made.sessions._known.scales.of(SPEC)
        assert scale < 0.9 * FIRST_SCALES[True] if right else scale > 1.02 * FIRST_SCALES[True]
        made.table.clear()


@pytest.mark.parametrize("drafter", [MODEL, SAMPLED])
def test_static_shapes_follow_what_was_accepted(draft: Draft, drafter: str) -> None:
    """Where second children are right again and again, later shapes look at more of them; only static ones teach it."""
    known, noise, static = draft.sessions._known, noise_of(drafter, Rule.MATCH), TreeShape(is_static=True)
    draft.open(SPEC, 4, shape=static, drafter=drafter)
    trees = [draft.tree()]
    for length in range(len(PROMPT) + 1, len(PROMPT) + 41):
        token_id = trees[-1].token_ids[trees[-1].children(0)[1] - 1]
        draft.advance(1, length, [token_id], 4, static)
        trees.append(draft.tree())
    assert trees[-1].parents == static_shape(known.ranks.of(SPEC, noise), 4, 10).parents
    assert [trees[place].parents for place in (0, -1)] == [(0, 1, 2, 0), (0, 1, 1, 0)]
    assert known.scales.of(SPEC) == FIRST_SCALES[True]
    rates = known.ranks.of(SPEC, noise)
    draft.open(SPEC, 4, 2, TreeShape(), drafter)
    draft.advance(2, len(PROMPT) + 1, [draft.tree().token_ids[0]], 4, TreeShape())
    draft.run()
    assert known.ranks.of(SPEC, noise) == rates


SETTINGS = DraftSettings(str(TRAINED), "127.0.0.1:0", threads=1, kv_tokens=4096)


async def test_a_service_makes_the_tree_that_a_message_asks_for() -> None:
    """It says so in its offers, sends parents and values, and a message without a shape gets a chain again."""
    service = await start(SETTINGS)
    async with channel_to(service.address) as channel:
        client = DraftClient(channel)
        info = await client.info()
        assert all(offer.makes_trees for offer in info.drafter_offers)
        assert info.max_draft_count == 64
        spec = spec_of(PROMPT, 200, seed=3, eos=(), temperature=1.0)
        await client.open(spec, 12, shape=pb.TreeShape(max_children=3))
        proposal = (await client.read()).proposal
        tree = tree_from(proposal, 4096, 64, with_logprobs=True)
        expected = fresh_tree(service.runner, spec, 12, TreeShape(max_children=3))
        assert (tree.token_ids, tree.parents) == (expected.token_ids, expected.parents)
        assert tree.values == pytest.approx(expected.values)
        await client.advance(1, 6, [tree.token_ids[0]], 4)
        assert not (await client.read()).proposal.parents
        await client.advance(1, 7, [9], 64, pb.TreeShape())
        assert len((await client.read()).proposal.token_ids) == 64
        await client.close(1)
    await service.stop(0)
    check_empty(service.runner.pool)


BAD_SHAPES = {
    "more rows than asked for": (pb.TreeShape(expansions=[2, 2]), "shape.expansions"),
    "nine children": (pb.TreeShape(max_children=9), "shape.max_children"),
    "deeper than 32": (pb.TreeShape(max_depth=33), "shape.max_depth"),
    "no children": (pb.TreeShape(expansions=[0]), "shape.expansions"),
    "wider than 64": (pb.TreeShape(max_width=65), "shape.max_width"),
    "two fixed shapes": (pb.TreeShape(expansions=[2], is_static=True), "shape.expansions"),
    "a level that is narrower than itself": (pb.TreeShape(expansions=[2], max_width=1), "shape.expansions"),
}


@pytest.mark.parametrize(("shape", "field"), BAD_SHAPES.values(), ids=BAD_SHAPES)
async def test_impossible_shapes_are_refused(shape: pb.TreeShape, field: str) -> None:
    """With the field and the limit, in both messages that may have one."""
    service = await start(SETTINGS)
    async with channel_to(service.address) as channel:
        spec = spec_of(PROMPT, 100, eos=())
        for action in ("open", "advance"):
            client = DraftClient(channel)
            if action == "advance":
                await client.open(spec, 1)
                await client.read()
                await client.advance(1, 6, [9], 5, shape)
            else:
                await client.open(spec, 5, shape=shape)
            with pytest.raises(InvalidRequest, match=f"{action}.{field}"):
                await client.read()
    await service.stop(0)
