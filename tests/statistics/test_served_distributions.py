"""Three thousand requests through real services and a gateway follow the distribution that transformers computes.

Weights are random and the vocabulary is small, so that the joint distribution of two tokens can be tested. Seeds are
fixed.
"""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.basics import grid
from support.drafting.rules import Floats, chance
from support.heads.kangaroo import write_kangaroo
from support.heads.tiny_heads import dflash, eagle1, pass_embeddings
from support.models.engine_cases import native
from support.models.tiny_gguf import DYNAMIC, Metadata, Tensors, write_gguf
from support.models.tiny_models import write_tiny_model
from support.stack import Answer, reference_model, running_stack

from outrider.drafters.drafter import NO_PROPOSAL, DrafterProposal, GuessLimits
from outrider.drafters.hosted import HostedDraft
from outrider.drafters.shelf.probing import Lookahead, ProbeDraft
from outrider.engine.batching import Feed
from outrider.engine.noise import Purpose, first_uniforms, round_key
from outrider.engine.runner import ModelRunner
from outrider.engine.session import Session
from outrider.errors import NoTokenLeft
from outrider.model_files.gguf.header import BLOCK_DTYPES
from outrider.parameters import DraftDistribution
from outrider.token_tree import TokenTree
from outrider.v1 import generation_service_pb2 as pb
from outrider.v1 import types_pb2
from target_service import acceptance

pytestmark = pytest.mark.slow

NUM_TOKENS = 16
# A GGUF file's own bits, with activations of eight bits.
FILE = "file"
AT_A_TIME = 32
PROMPT = [5, 9, 2, 11]
# The first token is plain decoding. The next two come of a round with two drafts, or of two when one is refused.
FIELDS = {"max_tokens": 4, "draft_count": 3, "temperature": 1.0, "ignore_eos": True}
# Every second token, and its next one in four groups.
CELLS = (1, 4)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a draft of sixteen tokens, both with random weights."""
    folder = tmp_path_factory.mktemp("pair")
    names = {"target": 0, "draft": 1}
    target, draft = (write_tiny_model(folder / each, "llama", NUM_TOKENS, seed) for each, seed in names.items())
    return target, draft


# Tokens of two kinds take turns, whichever begins: what may follow depends on the token before.
LOW, HIGH = range(1, 7), range(7, NUM_TOKENS)
TURNS = r"(?:[!-&]['-/]){2}|(?:['-/][!-&]){2}"


def distribution_of_two(model: Path, *, takes_turns: bool = False, stored: str = FILE) -> Floats:
    """The joint distribution [V, V] of the second and the third token after the prompt."""
    first = probs_behind(model, [PROMPT], stored)[0]
    second = probs_behind(model, [[*PROMPT, one] for one in range(NUM_TOKENS)], stored)
    pairs = [[*PROMPT, one, two] for one in range(NUM_TOKENS) for two in range(NUM_TOKENS)]
    third = probs_behind(model, pairs, stored)
    if takes_turns:
        # [V, V]: whether the second of two tokens may follow the first.
        legal = np.zeros((NUM_TOKENS, NUM_TOKENS))
        legal[np.ix_(LOW, HIGH)] = legal[np.ix_(HIGH, LOW)] = 1
        first = first * (np.arange(NUM_TOKENS) > 0)
        first = first / first.sum()
        second, third = second * legal, third * np.tile(legal, (NUM_TOKENS, 1))
        second, third = (each / np.maximum(each.sum(axis=1, keepdims=True), 1e-300) for each in (second, third))
    distribution: Floats = np.einsum("a,ab,abc->bc", first, second, third.reshape(NUM_TOKENS, NUM_TOKENS, NUM_TOKENS))
    return distribution


def probs_behind(model: Path, prefixes: list[list[int]], stored: str) -> Floats:
    """Probabilities [N, V] after prefixes of one length, float64; of a GGUF file with weights of the `stored` type."""
    if model.is_file():
        runner, rows = ModelRunner.load(str(model), dtype=stored, kv_tokens=1024), []
        for prefix in prefixes:
            session = runner.open(prefix, 1)
            rows.append(runner.forward([Feed(session)]).logits.clone())
            session.free()
        logits = torch.cat(rows)
    else:
        with torch.no_grad():
            logits = reference_model(model)(torch.tensor(prefixes)).logits[:, -1]
    probs: Floats = logits.double().softmax(dim=-1).numpy()
    return probs


async def chance_of_answers(
    pair: tuple[Path, Path],
    rule: str,
    num_requests: int,
    own: Mapping[str, Any] | None = None,
    *,
    takes_turns: bool = False,
    drafters: Sequence[str] = (),
    further_drafts: Mapping[str, str] | None = None,
    stored: str = FILE,
    shape: types_pb2.TreeShape | None = None,
) -> tuple[float, float]:
    """Asks with the seeds 0, 1, 2, ..., some at a time; how likely the answers are by the target's distribution and the
    draft's.

    The draft is a service; with `own` options of the target, what guesses in the target's process. `drafters` are asked
    by name where the draft has several, or is one of several. GGUF files are served, and compared, with weights of the
    `stored` type. With a shape guesses are trees of it.
    """
    number = getattr(types_pb2, f"ACCEPTANCE_RULE_{rule.upper()}")
    slots = asyncio.Semaphore(AT_A_TIME)
    # The columns of a window need room in front of the end.
    fields: dict[str, Any] = FIELDS | ({"max_tokens": 12} if own and "lookahead" in own else {})
    if shape is not None:
        fields |= {"shape": shape, "draft_count": 4}
    if drafters:
        fields["drafters"] = drafters
    if takes_turns:
        fields = {**fields, "ignore_eos": False, "constraint": pb.Constraint(regex=TURNS)}
    target, draft = map(str, pair)
    weights = {"dtype": stored} if pair[0].is_file() else {}
    services = {"target_options": weights | dict(own or {}), "further_drafts": further_drafts}
    async with running_stack(target, None if own else draft, dtype="float32", **services) as stack:

        async def answer(seed: int) -> Answer:
            async with slots:
                return await stack.generate(token_ids=PROMPT, seed=seed, rule=number, **fields)

        answers = await asyncio.gather(*(answer(seed) for seed in range(num_requests)))
    tokens = torch.tensor([each.token_ids[1:3] for each in answers])
    target_distribution, draft_distribution = (
        distribution_of_two(each, takes_turns=takes_turns, stored=stored) for each in pair
    )
    drafted, accepted = (
        sum(getattr(each.completion.speculation, name) for each in answers)
        for name in ("draft_tokens", "accepted_tokens")
    )
    assert 0.1 * drafted < accepted < 0.9 * drafted
    return chance(tokens, target_distribution, CELLS), chance(tokens, draft_distribution, CELLS)


async def check_requests(
    pair: tuple[Path, Path],
    rule: str,
    num_requests: int,
    own: Mapping[str, Any] | None = None,
    *,
    stored: str = FILE,
) -> None:
    """Compares the answers with both distributions; the draft's own must not pass for the target's."""
    by_target, by_draft = await chance_of_answers(pair, rule, num_requests, own, stored=stored)
    assert by_target > 1e-4
    assert by_draft < 1e-6


OFTEN = ("service", "masks", "hosted", "head", "block")
"""Drafters whose tokens are tested wherever there is time."""


# Under `match` tokens are compared one by one elsewhere.
@pytest.mark.parametrize(
    ("drafter", "rule"),
    [
        pytest.param(drafter, rule, marks=() if drafter in often else pytest.mark.grid)
        for rule, often in (("match", ()), ("ratio", ("service",)), ("block", OFTEN))
        for drafter in (*OFTEN, "layers", "adapter", "pass", "lookahead")
    ],
)
async def test_served_tokens_follow_the_distribution_of_the_target(
    pair: tuple[Path, Path], tmp_path: Path, rule: str, drafter: str
) -> None:
    """A thousand requests under each exact rule: chi-square of two tokens, p > 1e-4. The draft is bad at it."""
    # With small weights it hesitates, and is right now and then.
    head = eagle1(tmp_path / "head", vocab=NUM_TOKENS, scale=0.3)
    if drafter == "masks":
        # The mask is a token like any other, for which nothing was trained.
        pair = pair[0], write_tiny_model(tmp_path / "masks", "llama", NUM_TOKENS, 1, pard_token=3)
    own: dict[str, Mapping[str, Any] | None] = {
        "service": None,
        "masks": None,
        "hosted": {"draft_model": str(pair[1])},
        "head": {"head": str(head)},
        "block": {"head": str(block_of_sixteen(tmp_path / "block"))},
        "layers": {"exit_layer": 1},
        "adapter": {"head": str(write_kangaroo(tmp_path / "adapter", NUM_TOKENS, exit_layer=1))},
        "pass": {"head": str(pass_embeddings(tmp_path / "pass"))},
        "lookahead": {"lookahead": True},
    }
    await check_requests(pair, rule, 1000, own[drafter])


def block_of_sixteen(folder: Path) -> Path:
    """A block drafter for the target, with weights so small that it hesitates."""
    return dflash(folder, vocab=NUM_TOKENS, ids=(0,), mask=3, scale=0.3)


@pytest.mark.parametrize("rule", [*grid("ratio"), "block"])
@pytest.mark.parametrize("kind", ["eagle1", "dflash"])
async def test_tokens_of_a_head_s_trees_follow_the_distribution_of_the_target(
    pair: tuple[Path, Path], tmp_path: Path, rule: str, kind: str
) -> None:
    """Two siblings that are drawn one after the other, and a child of each; of a block both children are one row's."""
    folder = tmp_path / "head"
    own = {"head": str(eagle1(folder, vocab=NUM_TOKENS, scale=0.3) if kind == "eagle1" else block_of_sixteen(folder))}
    shape = types_pb2.TreeShape(expansions=[2, 1])
    by_target, by_draft = await chance_of_answers(pair, rule, 1000, own, shape=shape)
    assert by_target > 1e-4
    assert by_draft < 1e-6


@pytest.mark.parametrize("stored", BLOCK_DTYPES)
async def test_served_tokens_follow_the_distribution_of_a_files_own_bits(tmp_path: Path, stored: str) -> None:
    """Three types of matrices in queries, keys and values, and others elsewhere; the draft is two bits of the same."""

    def spell(metadata: Metadata, _: Tensors) -> None:
        # A merge, which every file has, of what sixteen ids can say.
        metadata["tokenizer.ggml.tokens"][15] = '!"'
        metadata["tokenizer.ggml.merges"] = ['! "']

    native()
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    model = write_tiny_model(tmp_path / "tiny", "llama", NUM_TOKENS, **sizes)
    target, draft = (write_gguf(model, tmp_path / f"{mix}.gguf", mix, spell) for mix in (DYNAMIC, "Q2_K"))
    await check_requests((target, draft), "ratio", 1000, stored=stored)


@pytest.mark.parametrize("rule", [*grid("match", "ratio"), "block"])
async def test_tokens_under_a_grammar_follow_the_masked_distribution(pair: tuple[Path, Path], rule: str) -> None:
    """That of the target, masked and made to sum to one at every token; the draft's masked one does not pass for it."""
    by_target, by_draft = await chance_of_answers(pair, rule, 2000, takes_turns=True)
    assert by_target > 1e-4
    assert by_draft < 1e-6


async def test_a_target_that_is_not_masked_is_found(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask on the draft's side alone: what the target adds is not legal, and nothing can follow it."""
    monkeypatch.setattr(acceptance, "scores_behind", lambda runner, logits, _inputs: logits)
    with pytest.raises(NoTokenLeft):
        await chance_of_answers(pair, "block", 100, takes_turns=True)


async def test_guesses_that_are_tested_with_another_law_are_found(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hosted draft whose guesses come with the even distribution instead of that which they were drawn from."""
    even, end = DraftDistribution(tuple(range(NUM_TOKENS)), (1,) * NUM_TOKENS), HostedDraft._end

    def end_falsely(self: HostedDraft, proposal: DrafterProposal = NO_PROPOSAL) -> None:
        token_ids = proposal.tree.token_ids
        end(self, proposal._replace(tree=TokenTree.chain(token_ids, [even] * len(token_ids))))

    monkeypatch.setattr(HostedDraft, "_end", end_falsely)
    by_target, _ = await chance_of_answers(pair, "ratio", 1000, {"draft_model": str(pair[1])})
    assert by_target < 1e-4


@pytest.mark.parametrize("is_fair", [*grid(True), False])
async def test_guesses_that_know_the_uniforms_of_their_round_are_found(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, is_fair: bool
) -> None:
    """The same guess in every round is exact, but not where it is made in those rounds that are likely to accept it."""
    guess, propose = int(distribution_of_two(pair[0]).sum(axis=0).argmax()), ProbeDraft.propose

    def peek(self: ProbeDraft, session: Session, limits: GuessLimits) -> None:
        propose(self, session, limits)
        key = round_key(self._spec.seed, len(session), len(session), Purpose.ACCEPTANCE)
        if first_uniforms([key])[0] > 0.3:
            self.proposal = NO_PROPOSAL

    monkeypatch.setattr(Lookahead, "candidates", lambda self, token_ids: [(guess,)])
    if not is_fair:
        monkeypatch.setattr(ProbeDraft, "propose", peek)
    by_target, _ = await chance_of_answers(pair, "ratio", 1000, {"lookahead": True})
    assert (by_target > 1e-4) == is_fair


@pytest.mark.parametrize(
    ("rule", "drafters"),
    [
        ("ratio", "a+b"),
        pytest.param("block", "a+b", marks=pytest.mark.grid),
        pytest.param("ratio", "model+sampled", marks=pytest.mark.grid),
        pytest.param("block", "model+sampled", marks=pytest.mark.grid),
    ],
)
async def test_tokens_that_several_drafters_guess_follow_the_law(
    pair: tuple[Path, Path], tmp_path: Path, rule: str, drafters: str
) -> None:
    """Two of one service, and two services: 4,000 answers."""
    other = str(write_tiny_model(tmp_path / "other", "llama", NUM_TOKENS, 2))
    names, further = drafters.split("+"), {"a": str(pair[1]), "b": other}
    by_target, by_draft = await chance_of_answers(pair, rule, 4000, drafters=names, further_drafts=further)
    assert by_target > 1e-4
    assert by_draft < 1e-6


@pytest.mark.grid
@pytest.mark.parametrize("rule", ["match", "ratio", "block"])
async def test_many_served_tokens_follow_the_distribution_of_the_target(pair: tuple[Path, Path], rule: str) -> None:
    """Three thousand requests under each exact rule."""
    await check_requests(pair, rule, 3000)
