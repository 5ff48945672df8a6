"""Whole requests on a device that is not there: the CPU's tokens, no host tensor among its own, and counted waits."""

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.basics import spec_of
from support.devices.pairs import load, on_both
from support.drafting.beams import Oracle, Searching, texts
from support.drafting.rules import drafted, ruled
from support.heads.heads import random_head
from support.heads.kangaroo import write_kangaroo
from support.heads.tiny_chains import CHAINS, write_chain
from support.models.layers import write_layered_model
from support.models.tiny_models import write_tiny_model
from support.services.stepped_target import PROMPT, VOCABULARY_SIZE, OwnTarget, Target
from tokenizers import Tokenizer

from outrider.beams import BeamSearch
from outrider.constraint import Constraint, ConstraintKind
from outrider.drafters.drafter import Drafter
from outrider.drafters.hosted import HostedModel, host_head
from outrider.drafters.shelf.early_exit import Kangaroo, LayerSkip
from outrider.drafters.shelf.probing import LOOKAHEAD, PASS, Lookahead, PassChain, ProbeDrafter, embed_probes
from outrider.engine.batching import Feed
from outrider.engine.heads.checkpoint import read_head
from outrider.engine.heads.feature_head import Fuse
from outrider.engine.runner import ModelRunner
from outrider.engine.sampling.draw import DrawInput
from outrider.grammar import GrammarEngine, canonical
from outrider.parameters import Rule, SessionSpec
from outrider.token_tree import TokenTree, TreeShape
from target_service.acceptance import decide
from target_service.states import Step

Told = list[Any]
SPEC = spec_of(PROMPT, 40, seed=3, eos=(), temperature=1.0)
BUSHY = TokenTree(token_ids=(11, 22, 33, 44, 55, 66, 77, 88), parents=(0, 0, 1, 1, 2, 5, 6, 3))
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.7},
    "top-k": {"temperature": 1.0, "top_k": 7},
    "top-p": {"temperature": 1.0, "top_p": 0.8},
    "min-p": {"temperature": 1.3, "min_p": 0.1},
    "penalties": {"temperature": 1.0, "repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "bias": {"temperature": 1.0, "logit_bias": {5: 3.0, 7: -2.0}, "min_tokens": 9},
}
# What a step of plain decoding waits with: its tokens, and with top-p whether a first guess of its size was enough.
WAITS = {"top-p": {"tolist", "bool"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_layered_model(tmp_path_factory.mktemp("layers") / "model")


def plainly(spec: SessionSpec, runner: ModelRunner) -> Told:
    """One session, step by step, with proposals of which one is a bushy tree."""
    target = Target(runner)
    target.open(spec, tree=TokenTree.chain((3, 4)))
    answers = target.run()
    while target.held.finish_reason is None:
        length = len(target.tokens)
        target.step(1, length, BUSHY if length < 20 else ())
        answers += target.run()
    target.table.clear()
    return [(each.content.token_ids, each.content.logprobs, each.content.prompt_logprobs) for each in answers]


@pytest.mark.parametrize("name", SAMPLING)
def test_a_step_waits_for_its_tokens_alone(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever changes the distribution: a request of so many steps waits as often, and has the CPU's tokens."""
    spec = replace(spec_of(PROMPT, 40, seed=3, eos=(9,), stops=(8,), **SAMPLING[name]), banned=((4, 5), (6,)))
    expected, found, waits = on_both(monkeypatch, folder, partial(plainly, spec))
    assert [each[0] for each in found] == [each[0] for each in expected]
    assert set(waits) == WAITS.get(name, {"tolist"})
    assert waits.count("tolist") == len(found)


def test_logprobs_are_read_from_the_device(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the prompt and of the output: numbers to rounding, and the same alternatives."""
    spec = replace(SPEC, logprob_count=3, prompt_logprobs=True)
    expected, found, _ = on_both(monkeypatch, folder, partial(plainly, spec))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours[0] == theirs[0]
        for one, other in zip((*ours[1], *ours[2]), (*theirs[1], *theirs[2]), strict=True):
            assert one.top_token_ids == other.top_token_ids
            assert [one.logprob, *one.top_logprobs] == pytest.approx([other.logprob, *other.top_logprobs], abs=1e-4)


def test_masks_of_a_grammar_go_to_the_device(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a tree have one each."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    letters = [tokenizer.token_to_id(letter) for letter in "abc"]

    def told(runner: ModelRunner) -> Told:
        engine = GrammarEngine(tokenizer.to_str(), VOCABULARY_SIZE, {0})
        grammar = asyncio.run(engine.followed(canonical(Constraint(ConstraintKind.REGEX, "[a-c]{40}")), b"", ()))
        spec = replace(SPEC, eos_token_ids=frozenset({0}), grammar=grammar.text)
        target = Target(runner)
        step = Step(TokenTree((*letters, 5), (0, 1, 0, 2)), 30, 0)
        target.sessions.open(target.fence(1, len(PROMPT)), spec, step, target.answers, grammar=grammar)
        target.run()
        tokens = list(target.tokens)
        target.table.clear()
        return tokens

    expected, found, waits = on_both(monkeypatch, folder, told)
    assert found == expected
    assert set(found[len(PROMPT) :]) <= {*letters}
    assert set(waits) == {"tolist"}


@pytest.fixture(scope="module")
def wishes(folder: Path) -> list[tuple[SessionSpec, TokenTree]]:
    """Chains and trees under every rule."""
    with pytest.MonkeyPatch.context() as patch:
        runner = load(folder, patch)
        made = []
        for number, rule in enumerate(Rule):
            for temperature in (0.9, 0.0):
                spec = replace(
                    ruled(spec_of(PROMPT, 60, seed=number, temperature=temperature), rule), eos_token_ids=frozenset()
                )
                chain = drafted(runner, spec, 4)
                laws = chain.distributions
                bushy = TokenTree((*chain.token_ids, chain.token_ids[0]), (0, 1, 1, 3, 0), (*laws, *laws[:1]))
                made += [(spec, chain), (spec, bushy)]
        return made


def decided(wishes: list[tuple[SessionSpec, TokenTree]], faulty: bool, runner: ModelRunner) -> Told:
    """The walks of one forward; of faulty sessions a row has no numbers."""
    inputs = [DrawInput(Feed(runner.open(spec.token_ids, spec.prompt_len), tree), spec) for spec, tree in wishes]
    result = runner.forward([each.feed for each in inputs])
    ranges = [rows for rows in result.ranges if rows is not None]
    for number, rows in enumerate(ranges if faulty else ()):
        result.logits[rows.start + number % 4, :] = (math.nan, math.inf, -math.inf)[number % 3]
    walks = decide(runner, inputs, result.logits, ranges)
    for each in inputs:
        each.feed.session.free()
    return [str(walk) for walk in walks]


def test_every_rule_decides_on_the_device_as_on_the_cpu(
    folder: Path, wishes: list[tuple[SessionSpec, TokenTree]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chains and trees side by side, hot and cold."""
    expected, found, waits = on_both(monkeypatch, folder, partial(decided, wishes, False))
    assert found == expected
    assert set(waits) <= {"tolist", "cpu", "bool"}


def test_a_row_without_numbers_is_its_sessions_error_on_the_device_too(
    folder: Path, wishes: list[tuple[SessionSpec, TokenTree]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN, infinity and nothing at all, in roots and in rows of proposals: errors and walks are the CPU's."""
    expected, found, _ = on_both(monkeypatch, folder, partial(decided, wishes, True))
    assert found == expected
    assert any("computed NaN or infinity" in each for each in found)
    assert any(each.startswith("Walk") for each in found)


def hosted_pair(folder: Path, runner: ModelRunner) -> Drafter:
    """The target's own weights as a draft model."""
    return HostedModel(ModelRunner(runner.model, runner.identity, 2048))


def chained(layout: str, folder: Path, runner: ModelRunner) -> Drafter:
    head = read_head(write_chain(folder / layout, CHAINS[layout]()), runner.parts)
    return host_head(runner, *head.load(runner.parts, runner.device, torch.float32, runner.ops))


def kangaroo(folder: Path, runner: ModelRunner) -> Drafter:
    head = read_head(folder / "kangaroo", runner.parts)
    return Kangaroo(runner, *head.load(runner.parts, runner.device, torch.float32, runner.ops))


def passing(_: Path, runner: ModelRunner) -> Drafter:
    rows = torch.randn(4, 48, generator=torch.Generator().manual_seed(2))
    probe_ids = embed_probes(runner, rows)
    return ProbeDrafter(runner, PASS, lambda: PassChain(probe_ids))


DRAFTERS: dict[str, Callable[[Path, ModelRunner], Drafter]] = {
    "hosted": hosted_pair,
    "eagle3": lambda _, runner: host_head(runner, random_head(runner), ""),
    "eagle1": lambda _, runner: host_head(runner, random_head(runner, Fuse.PAIR), ""),
    "mtp": lambda _, runner: host_head(runner, random_head(runner, Fuse.REVERSED), ""),
    "layer-skip": lambda _, runner: LayerSkip(runner, 2),
    "kangaroo": kangaroo,
    "lookahead": lambda _, runner: ProbeDrafter(runner, LOOKAHEAD, partial(Lookahead, window=3, depth=3)),
    "pass": passing,
}


def guessed(
    make: Callable[[ModelRunner], Drafter], spec: SessionSpec, shape: TreeShape | None, runner: ModelRunner
) -> Told:
    own = OwnTarget(runner, make(runner), shape)
    answers = own.to_the_end(spec, 4, budget=2)
    told = [(each.content.token_ids, each.content.hosted.tree) for each in answers]
    own.table.clear()
    return told


@pytest.mark.parametrize("rule", [Rule.MATCH, Rule.BLOCK])
@pytest.mark.parametrize("name", DRAFTERS)
def test_drafters_of_the_target_guess_on_its_device(
    folder: Path, tmp_path: Path, name: str, rule: Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the CPU's guesses and tokens, also where the target goes on from layers that a draft has computed."""
    write_kangaroo(tmp_path / "kangaroo", VOCABULARY_SIZE)
    monkeypatch.setattr(ModelRunner, "is_row_invariant", property(lambda _: True))
    tell = partial(guessed, partial(DRAFTERS[name], tmp_path), ruled(SPEC, rule), None)
    expected, found, waits = on_both(monkeypatch, folder, tell)
    assert found == expected
    assert any(tree for _, tree in found)
    # Before its first token it is loaded.
    assert "to" not in waits[waits.index("tolist") :]


@pytest.mark.parametrize("layout", ["mlp-scaled", "hydra++", "medusa", "vllm-map", "bpd"])
def test_heads_of_each_depth_guess_on_the_targets_device(
    tmp_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each depth computes its own rows, of which the host knows the depths."""
    folder = write_tiny_model(tmp_path / "model", "llama")
    spec = spec_of((5, 17, 20, 3, 9), 30, seed=3, eos=(), temperature=1.0)
    tell = partial(guessed, partial(chained, layout, tmp_path), spec, None)
    expected, found, _ = on_both(monkeypatch, folder, tell)
    assert found == expected


def searched(runner: ModelRunner) -> Told:
    """A search that learns, and the same with guesses of what it keeps."""
    found: Told = []
    target, oracle = Target(runner), Oracle(2)
    for guess in (oracle.watch, oracle):
        search = Searching(target, replace(SPEC, eos_token_ids=frozenset({0, 9, 30})), BeamSearch(3), bytes(16))
        search.to_the_end(guess)
        found.append(texts(search.record.finished))
        target.table.clear()
    return found


def test_beams_are_found_on_the_device(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forks copy pages there, and each step reads its candidates."""
    expected, found, waits = on_both(monkeypatch, folder, searched)
    assert found == expected
    assert found[0] == found[1]
    assert set(waits) <= {"nonzero", "tolist"}
