"""A target that drafts for itself: what it commits is plain decoding's, in fewer passes, asked and unasked."""

import os
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.basics import Answers, check_empty, spec_of
from support.drafting.rules import ruled
from support.drafting.toy_drafters import ToyDraft, ToyDrafter, adversary, dice, oracle
from support.heads.heads import random_head
from support.heads.kangaroo import write_kangaroo
from support.heads.tiny_chains import CHAINS, VOCAB, write_chain
from support.models.tiny_models import write_tiny_model, write_tokenizer
from support.services.stepped_draft import Draft
from support.services.stepped_target import PROMPT, VOCABULARY_SIZE, OwnTarget, check_pure, check_storm, plain, storm
from tokenizers import Tokenizer

from outrider.constraint import Constraint, ConstraintKind
from outrider.drafters.drafter import Drafter, GuessLimits
from outrider.drafters.hosted import HOSTED, HostedModel, host_head
from outrider.drafters.shelf.early_exit import LAYER_SKIP, Kangaroo, LayerSkip
from outrider.engine.heads.checkpoint import read_head
from outrider.engine.heads.feature_head import Fuse
from outrider.engine.runner import ModelRunner
from outrider.errors import InvalidRequest
from outrider.grammar import GrammarEngine, canonical
from outrider.parameters import Rule, SessionSpec
from outrider.token_tree import EMPTY, TokenTree, TreeShape
from target_service.states import Step

SPEC = spec_of(PROMPT, 60, seed=3, eos=(), temperature=1.0)
GREEDY = spec_of(PROMPT, 60, seed=3, eos=())


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    """A draft model of the target's vocabulary."""
    folder = write_tiny_model(
        tmp_path_factory.mktemp("small") / "model", "llama", vocab_size=VOCABULARY_SIZE, context_len=640, seed=7
    )
    return ModelRunner.load(str(folder), dtype="float32", kv_tokens=4096)


LAYERS = {"eagle3": Fuse.WIDE, "eagle1": Fuse.PAIR, "mtp": Fuse.REVERSED}
HEADS = (*LAYERS, "mlp", "hydra", "hydra++", "medusa", "bpd", LAYER_SKIP, "kangaroo")


def hosting_of(drafter: str, runner: ModelRunner, small: ModelRunner, folder: Path) -> Drafter:
    """The draft model, a random layer, or a head that is written into the folder and read."""
    if drafter == HOSTED:
        return HostedModel(small)
    if drafter in LAYERS:
        return host_head(runner, random_head(runner, LAYERS[drafter]), "")
    if drafter == LAYER_SKIP:
        return LayerSkip(runner, 1)
    if drafter == "kangaroo":
        adapter = read_head(write_kangaroo(folder / "adapter", runner.config.vocab_size, exit_layer=1), runner.parts)
        return Kangaroo(runner, *adapter.load(runner.parts, runner.device, torch.float32, runner.ops))
    found = read_head(write_chain(folder, CHAINS[drafter]()), runner.parts)
    return host_head(runner, *found.load(runner.parts, runner.device, torch.float32, runner.ops))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of the vocabulary that chained heads are written for."""
    return write_tiny_model(tmp_path_factory.mktemp("wide") / "model", "llama", vocab_size=VOCAB, context_len=640)


@pytest.fixture(autouse=True)
def _empty(small: ModelRunner) -> Iterator[None]:
    yield
    check_empty(small.pool)


@pytest.mark.parametrize("spec", [GREEDY, SPEC], ids=["greedy", "sampled"])
@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("budget", [0, 7, 40])
@pytest.mark.parametrize("kind", ["oracle", "adversary", "dice"])
def test_tokens_are_those_of_plain_decoding(
    runner: ModelRunner, spec: SessionSpec, count: int, budget: int, kind: str
) -> None:
    """Whatever guesses; an oracle's guesses are all kept, K + 1 tokens a pass, and none of an adversary's."""
    tokens = plain(runner, spec)
    guesses = {
        "oracle": oracle(tokens),
        "adversary": adversary(tokens, VOCABULARY_SIZE),
        "dice": dice(VOCABULARY_SIZE),
    }[kind]
    drafter = ToyDrafter(guesses)
    own = OwnTarget(runner, drafter)
    answers = own.to_the_end(spec, count, budget)
    assert own.tokens == tokens
    drafted = [answer.content for answer in answers if answer.content.hosted.tree]
    if kind == "oracle":
        assert all(len(decided.token_ids) == len(decided.hosted.tree) + 1 for decided in drafted)
        assert sum(len(decided.hosted.tree) == count for decided in drafted) >= (60 - 5 - 2) // (count + 1) // 2
    if kind == "adversary":
        assert all(decided.accepted_rows == () for decided in drafted)
    assert {decided.hosted.times.compute_us for decided in drafted} == {2}
    own.table.clear()
    assert drafter.drafts[0].freed


@pytest.mark.parametrize("drafter", [HOSTED, "eagle3", LAYER_SKIP, "kangaroo"])
async def test_guesses_follow_the_grammar_of_the_answer(
    folder: Path, wide: Path, small: ModelRunner, tmp_path: Path, drafter: str
) -> None:
    """Whatever guesses has a grammar of the same text, and the answer's own is asked about the answer alone."""
    runner = ModelRunner.load(str(folder if drafter == HOSTED else wide), dtype="float32", kv_tokens=4096)
    size = runner.config.vocab_size
    write_tokenizer(tmp_path, size)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    engine, regex = GrammarEngine(tokenizer.to_str(), size, {0}), Constraint(ConstraintKind.REGEX, "[a-c]{40}")
    grammar = await engine.followed(canonical(regex), b"", ())
    spec = replace(SPEC, token_ids=(5, 17, 20, 3, 9), eos_token_ids=frozenset({0}), grammar=grammar.text)
    own = OwnTarget(runner, hosting_of(drafter, runner, small, tmp_path / "head"))
    step = Step(EMPTY, 0, 0, GuessLimits(4))
    own.sessions.open(own.fence(1, len(PROMPT)), spec, step, own.answers, own.drafter, grammar=grammar)
    answers = own.run()
    for _ in range(6):
        own.go_on(4)
        answers += own.run()
    letters = {tokenizer.token_to_id(letter) for letter in "abc"}
    guesses = [token_id for answer in answers for token_id in answer.content.hosted.tree.token_ids]
    assert guesses
    assert {*guesses, *own.tokens[len(PROMPT) :]} <= letters
    own.table.clear()


def test_a_budget_is_a_length(runner: ModelRunner) -> None:
    """Unasked verdicts with guesses commit as many tokens as plain ones would, in fewer passes, and not one more."""
    tokens = plain(runner, GREEDY)
    drafter = ToyDrafter(oracle(tokens))
    own = OwnTarget(runner, drafter)
    own.ask(GREEDY, 4, budget=20)
    answers = own.run()
    assert len(own.tokens) == len(PROMPT) + 1 + 20
    sizes = [len(answer.content.token_ids) for answer in answers]
    assert sizes == [1, 5, 5, 5, 5]
    own.go_on(4, budget=7)
    assert [len(answer.content.token_ids) for answer in own.run()] == [5, 3]
    own.table.clear()


def test_a_proposal_of_the_step_wins(runner: ModelRunner) -> None:
    """And nothing is drafted; without guesses asked for a round is plain."""
    tokens = plain(runner, GREEDY)
    drafter = ToyDrafter(oracle(tokens))
    own = OwnTarget(runner, drafter)
    own.ask(GREEDY, 4)
    own.run()
    own.go_on(4, tree=TokenTree.chain(tokens[6:8]))
    [answer] = own.run()
    assert answer.content.hosted.tree == EMPTY
    assert len(answer.content.token_ids) == 3
    own.go_on(0)
    [answer] = own.run()
    assert len(answer.content.token_ids) == 1
    assert drafter.drafts[0].begun == []
    own.table.clear()


def test_guesses_need_a_drafter(runner: ModelRunner) -> None:
    """A step that asks for some is refused where the session was opened without one."""
    own = OwnTarget(runner, ToyDrafter(dice(9)))
    own.drafter = ""
    with pytest.raises(InvalidRequest, match=r"step\.own_draft_count is 2, but must be 0"):
        own.ask(GREEDY, 2)
    own.ask(GREEDY, 0)
    own.run()
    with pytest.raises(InvalidRequest, match=r"step\.own_draft_count"):
        own.go_on(2)
    with pytest.raises(InvalidRequest, match=r"acknowledge\.own_draft_count"):
        own.sessions.acknowledge(own.fence(1, len(own.tokens)), 0, 0, own.answers, GuessLimits(2))
    own.table.clear()


def test_others_do_not_wait_for_a_drafter_that_reads(runner: ModelRunner) -> None:
    """A session whose drafter has much to read has no part in steps until that is done; others go on meanwhile."""
    tokens = plain(runner, GREEDY)
    drafter = ToyDrafter(oracle(tokens), steps=10)
    own = OwnTarget(runner, drafter)
    own.ask(GREEDY, 0)
    own.run()
    reader, other = own.session_id, os.urandom(16)
    own.session_id = other
    own.open(GREEDY, budget=30)
    own.device.step(own.verifier.advance)
    own.session_id = reader
    own.go_on(3)
    before = len(own.tokens)
    for _ in range(6):
        own.device.step(own.verifier.advance)
    assert len(own.tokens) == before
    held = own.table.get(other)
    assert held is not None
    assert len(held.session.token_ids) >= len(PROMPT) + 6
    own.run()
    assert own.tokens == tokens[: before + 4]
    assert drafter.drafts[0].begun == [3]
    own.table.clear()


class Broken(ToyDrafter):
    """Raises in place of a proposal."""

    def advance(self, drafts: object) -> None:
        raise RuntimeError("broken")


class BrokenDraft(ToyDraft):
    """Raises before it has begun."""

    def propose(self, session: object, limits: GuessLimits) -> None:
        raise RuntimeError("broken")


class BrokenEarly(ToyDrafter):
    """Drafter whose sessions raise."""

    def open(self, spec: SessionSpec, salt: bytes | None) -> ToyDraft:
        return BrokenDraft(self.guesses, spec, self.steps)


@pytest.mark.slow
@pytest.mark.parametrize("broken", [Broken, BrokenEarly])
def test_a_drafter_that_fails_costs_no_token(runner: ModelRunner, broken: type[ToyDrafter]) -> None:
    """Its sessions decode plainly."""
    tokens = plain(runner, GREEDY)
    own = OwnTarget(runner, broken(oracle(tokens)))
    answers = own.to_the_end(GREEDY, 3, budget=9)
    assert own.tokens == tokens
    assert not any(answer.content.hosted.tree for answer in answers)
    own.table.clear()


@pytest.mark.slow
@pytest.mark.parametrize("rule", [Rule.MATCH, Rule.RATIO, Rule.BLOCK])
@pytest.mark.parametrize("seed", [0, 1, 2, 3])
@pytest.mark.parametrize("drafter", ["hosted", *HEADS])
def test_a_storm_changes_no_token_and_no_proposal(
    folder: Path, wide: Path, tmp_path: Path, small: ModelRunner, drafter: str, seed: int, rule: Rule
) -> None:
    """Rollbacks, opens with newer epochs, repeats, lost caches of both models, K that changes: tokens are plain's.

    And a proposal is a function of tokens, K and noise alone: after the same tokens it is a fresh session's, with the
    distributions that it was drawn from. (Under rules with uniforms, what is committed depends on K.)
    """
    runner = ModelRunner.load(str(folder if drafter == HOSTED else wide), dtype="float32", kv_tokens=4096)
    hosting = hosting_of(drafter, runner, small, tmp_path)
    spec = ruled(replace(SPEC, seed=seed), rule)
    tokens = plain(runner, spec)
    own = OwnTarget(runner, hosting)
    said, proposals = storm(own, spec, random.Random(seed))
    if rule is Rule.MATCH:
        assert own.tokens == tokens
        assert all(each == tokens[: len(each)] for each in said)
    assert len(proposals) > 5
    check_pure(runner, hosting, spec, proposals)
    own.table.clear()
    check_empty(runner.pool)


@pytest.mark.parametrize("rule", [Rule.MATCH, Rule.RATIO, Rule.BLOCK])
def test_the_hosted_model_proposes_what_a_draft_service_would(
    runner: ModelRunner, small: ModelRunner, rule: Rule
) -> None:
    """Bit for bit, distributions included."""
    spec = ruled(SPEC, rule)
    draft, hosted = Draft(small), HostedModel(small).open(spec, None)
    tokens = plain(runner, SPEC)
    draft.open(spec, 4)
    for length in (5, 6, 9, 13):
        [answer] = draft.run()
        hosted.propose(runner.open(tokens[:length], len(PROMPT)), GuessLimits(4))
        while hosted.proposal is None:
            HostedModel(small).advance([hosted])
        assert hosted.proposal.tree == answer.content
        assert bool(hosted.proposal.tree.distributions) == rule.needs_distributions
        next_len = {5: 6, 6: 9, 9: 13, 13: 14}[length]
        draft.advance(1, next_len, tokens[length:next_len], 4)
    draft.run()
    draft.table.clear()
    hosted.free()


SHAPES = {
    "any": TreeShape(),
    "three children": TreeShape(max_children=3, max_depth=3),
    "expansions": TreeShape(expansions=(2, 1)),
    "width": TreeShape(max_width=2),
    "static": TreeShape(is_static=True),
}
EVERY_SHAPE = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


@pytest.mark.slow
@EVERY_SHAPE
@pytest.mark.parametrize("spec", [GREEDY, SPEC], ids=["greedy", "sampled"])
@pytest.mark.parametrize("budget", [0, 9])
def test_trees_change_no_token(
    runner: ModelRunner, small: ModelRunner, shape: TreeShape, spec: SessionSpec, budget: int
) -> None:
    """Asked and unasked, with a budget that stays a length, and with values that travel; some are no chains."""
    own = OwnTarget(runner, HostedModel(small), shape)
    answers = own.to_the_end(spec, 6, budget)
    assert own.tokens == plain(runner, spec)
    trees = [answer.content.hosted.tree for answer in answers if answer.content.hosted.tree]
    assert all(len(tree.values) == len(tree) <= 6 for tree in trees)
    assert sum(not tree.is_chain for tree in trees) > len(trees) / 2
    own.table.clear()


def test_guesses_of_the_target_itself_are_kept_by_a_tree(runner: ModelRunner) -> None:
    """A draft with the target's weights is right down to a leaf every time, and no deeper than was asked for."""
    own = OwnTarget(runner, HostedModel(runner), TreeShape(max_depth=3))
    answers = own.to_the_end(SPEC, 8, 20)
    assert own.tokens == plain(runner, SPEC)
    rounds = [answer.content for answer in answers if answer.content.hosted.tree]
    assert not any(each.hosted.tree.children(each.accepted_rows[-1]) for each in rounds)
    assert max(len(each.accepted_rows) for each in rounds) == max(max(each.hosted.tree.depths) for each in rounds) == 3
    own.table.clear()


@pytest.mark.slow
@EVERY_SHAPE
@pytest.mark.parametrize("rule", [Rule.BLOCK, Rule.MATCH, Rule.TYPICAL, Rule.RATIO])
def test_a_storm_leaves_trees_pure(
    runner: ModelRunner, small: ModelRunner, shape: TreeShape, rule: Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was not learned from is a function of tokens, rows, depth and noise alone, distributions included."""
    hosting = HostedModel(small)
    check_storm(runner, hosting, OwnTarget(runner, hosting, shape), ruled(SPEC, rule), shape, monkeypatch)


def test_the_hosted_model_grows_the_trees_of_a_draft_service(runner: ModelRunner, small: ModelRunner) -> None:
    """Bit for bit, while both learn from the same tokens; of scales and of rates by rank."""
    tokens = plain(runner, SPEC)
    for shape in (TreeShape(), TreeShape(is_static=True)):
        draft, model = Draft(small), HostedModel(small)
        hosted = model.open(SPEC, None)
        draft.open(SPEC, 5, shape=shape)
        values: set[tuple[float, ...]] = set()
        for length in range(5, 40):
            expected = draft.tree()
            hosted.propose(runner.open(tokens[:length], len(PROMPT)), GuessLimits(5, shape, 60))
            while hosted.proposal is None:
                model.advance([hosted])
            assert hosted.proposal.tree == expected
            values.add(expected.values)
            draft.advance(1, length + 1, tokens[length : length + 1], 5, shape)
        draft.run()
        assert len(values) > 10
        draft.table.clear()
        hosted.free()


def test_what_is_rolled_back_teaches_nothing(runner: ModelRunner, small: ModelRunner) -> None:
    """After a shorter text, and in a session that was freed, there is no proposal to learn from."""
    tokens, model = plain(runner, SPEC), HostedModel(small)
    for length, teaches in ((9, True), (8, False), (None, False)):
        before = model._known.scales.of(SPEC)
        hosted = model.open(SPEC, None)
        hosted.propose(runner.open(tokens[:9], len(PROMPT)), GuessLimits(5, TreeShape(), 60))
        while hosted.proposal is None:
            model.advance([hosted])
        if length is None:
            hosted.free()
        else:
            hosted.truncate(length)
        hosted.propose(runner.open(tokens[:12], len(PROMPT)), GuessLimits())
        assert (model._known.scales.of(SPEC) != before) is teaches
        hosted.free()


@pytest.mark.parametrize("drafter", [LAYER_SKIP, "kangaroo"])
def test_who_makes_chains_is_asked_for_no_tree(wide: Path, small: ModelRunner, tmp_path: Path, drafter: str) -> None:
    """By name, in every message that may ask; so is a session without a drafter."""
    runner = ModelRunner.load(str(wide), dtype="float32", kv_tokens=4096)
    hosting = hosting_of(drafter, runner, small, tmp_path)
    own = OwnTarget(runner, hosting, TreeShape())
    limit = f"absent for the drafter {hosting.name}, which makes chains"
    with pytest.raises(InvalidRequest, match=rf"step\.own_shape is 'present', but must be {limit}"):
        own.ask(GREEDY, 2)
    own.shape = None
    own.ask(GREEDY, 2)
    own.run()
    own.shape = TreeShape()
    with pytest.raises(InvalidRequest, match=rf"step\.own_shape .* {limit}"):
        own.go_on(2)
    with pytest.raises(InvalidRequest, match=rf"acknowledge\.own_shape .* {limit}"):
        own.sessions.acknowledge(own.fence(1, len(own.tokens)), 5, 0, own.answers, GuessLimits(2, TreeShape()))
    own.table.clear()
    bare = OwnTarget(runner, hosting, TreeShape())
    bare.drafter = ""
    with pytest.raises(InvalidRequest, match=r"step\.own_shape .* absent for a session without a drafter"):
        bare.ask(GREEDY, 0)


def test_a_session_without_room_at_the_drafter_decodes_plainly(runner: ModelRunner, folder: Path) -> None:
    """A hosted model's cache is its own; who finds none there takes nothing from others."""
    small = ModelRunner.load(str(folder), dtype="float32", kv_tokens=32)
    own = OwnTarget(runner, HostedModel(small))
    answers = own.to_the_end(GREEDY, 3)
    assert own.tokens == plain(runner, GREEDY)
    drafted = [answer.fence.base_len for answer in answers if answer.content.hosted.tree]
    assert drafted
    assert max(drafted) < 32
    own.table.clear()
    check_empty(small.pool)
    assert isinstance(own.answers, Answers)
