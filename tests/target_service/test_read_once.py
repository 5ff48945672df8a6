"""Prompts that begin alike and come at once: what they have in common is read for one, and the others take it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.basics import Answers, check_empty, spec_of
from support.drafting.rules import asking
from support.services.stepped_target import Target

from outrider.engine import sharing
from outrider.engine.runner import ModelRunner
from outrider.engine.session import Session
from outrider.parameters import SessionSpec
from outrider.rpc.fencing import Fence
from outrider.token_tree import EMPTY
from target_service.acceptance import TargetVerdict
from target_service.states import Step

COMMON = tuple(range(1, 101))


@pytest.fixture
def runner(folder: Path) -> ModelRunner:
    """One whose cache has seen nothing."""
    return ModelRunner.load(str(folder), dtype="float32", kv_tokens=2048)


def texts(count: int, common: Sequence[int] = COMMON) -> list[SessionSpec]:
    """Requests whose prompts differ after what they have in common."""
    ids = [(*common, *(200 + number for _ in range(10)), number) for number in range(count)]
    return [spec_of(each, len(each) + 8, seed=n, eos=(), temperature=1.0) for n, each in enumerate(ids)]


def open_each(target: Target, specs: Sequence[SessionSpec], owners: Sequence[Answers]) -> list[Fence]:
    """All of them before the first step."""
    fences = [Fence(bytes([n] * 16), 1, len(spec.token_ids)) for n, spec in enumerate(specs)]
    for fence, spec, owner in zip(fences, specs, owners, strict=True):
        target.sessions.open(fence, spec, Step(EMPTY, 0, 0), owner)
    return fences


def verdicts(answers: Answers) -> dict[bytes, TargetVerdict]:
    """The first verdict of each session."""
    assert all(answer.error is None for answer in answers)
    return {answer.fence.session_id: answer.content for answer in answers}


def said(target: Target, specs: Sequence[SessionSpec], owners: Sequence[Answers]) -> tuple[list[TargetVerdict], int]:
    """First verdicts of sessions that come at once, and the rows that were computed for them."""
    fences, before = open_each(target, specs, owners), target.runner.forward_counts.num_rows
    target.device.run(target.verifier.advance)
    found = {each: verdict for owner in owners for each, verdict in verdicts(owner).items()}
    num_rows = target.runner.forward_counts.num_rows - before
    target.table.clear()
    return [found[fence.session_id] for fence in fences], num_rows


def alone(target: Target, specs: Sequence[SessionSpec]) -> list[tuple[int, ...]]:
    """What each says by itself, with nothing cached."""
    plain = Target(target.runner, prefix_cache=False)
    return [said(plain, [spec], [Answers()])[0][0].token_ids for spec in specs]


def test_a_common_beginning_is_read_once(target: Target) -> None:
    """Four of 100 tokens and eleven of their own: one reads all, the others what is theirs, and say what they would."""
    specs = texts(4)
    owner = Answers()
    found, num_rows = said(target, specs, [owner] * 4)
    assert [each.token_ids for each in found] == alone(target, specs)
    # Of the common tokens six blocks of 16.
    assert num_rows == 111 + 3 * (111 - 96)
    assert [each.prefix_len for each in found] == [0, 96, 96, 96]
    counts = target.sessions.counts()
    assert (counts.prefix_query_tokens, counts.prefix_hit_tokens) == (4 * 111, 3 * 96)


def test_who_reads_in_pieces_is_followed(target: Target) -> None:
    """The others have nothing computed beside it, and begin where it has left what they share."""
    target.runner.max_rows = 40
    specs = texts(3)
    found, num_rows = said(target, specs, [Answers()] * 3)
    assert [each.token_ids for each in found] == alone(target, specs)
    # When less than 64 common tokens are left, the second begins beside the first, in the nine rows that are free.
    assert num_rows == 111 + 2 * (111 - 96) + 9


@pytest.mark.parametrize(
    ("change", "common"),
    [
        ({"cache_salt": b"tenant"}, COMMON),
        (None, COMMON),
        ({}, COMMON[:60]),
        ({}, (*COMMON[:20], 250, *COMMON[21:])),
    ],
    ids=["salt", "owner", "short", "other"],
)
def test_others_are_read_beside_it(target: Target, change: dict[str, bytes] | None, common: Sequence[int]) -> None:
    """Of another tenant, of another gateway, with less in common, or with other tokens: none waits for the first."""
    specs = [texts(1)[0], replace(texts(2, common)[1], **(change or {}))]
    first = Answers()
    second = Answers() if change is None else first
    open_each(target, specs, [first, second])
    target.device.step(target.verifier.advance)
    assert [len(first), len(second)] == ([1, 1] if change is None else [2, 2])
    target.table.clear()


def test_one_that_ends_leaves_its_place(target: Target) -> None:
    """The next reads on where it has stopped."""
    target.runner.max_rows = 40
    specs, owner = texts(3), Answers()
    fences = open_each(target, specs, [owner] * 3)
    target.device.step(target.verifier.advance)
    target.table.close(fences[0], owner)
    target.device.run(target.verifier.advance)
    found = verdicts(owner)
    assert fences[0].session_id not in found
    assert [found[fence.session_id].token_ids for fence in fences[1:]] == alone(target, specs[1:])


def test_whoever_wants_log_probabilities_of_its_prompt_waits_for_none(target: Target) -> None:
    """It needs every row; the others take what it has read."""
    specs = [texts(1)[0], asking(texts(2)[1]), texts(3)[2]]
    found, num_rows = said(target, specs, [Answers()] * 3)
    assert len(found[1].prompt_logprobs) == 110
    assert [each.token_ids for each in found] == alone(target, specs)
    assert num_rows == 2 * 111 + (111 - 96)


def test_a_full_pool_keeps_none_waiting_for_long(folder: Path) -> None:
    """Blocks for one and a half prompts: sessions give way and take turns, and all say what they would."""
    target = Target(ModelRunner.load(str(folder), dtype="float32", kv_tokens=176))
    specs = texts(3)
    found, _ = said(target, specs, [Answers()] * 3)
    roomy = Target(ModelRunner.load(str(folder), dtype="float32", kv_tokens=2048))
    assert [each.token_ids for each in found] == alone(roomy, specs)
    check_empty(target.runner.pool)


def test_waiting_for_what_is_another_is_found(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: whoever shares a first token waits, though it takes nothing of what is read then."""
    monkeypatch.setattr(Session, "coming", lambda session, _: session.token_ids[0])
    specs = [texts(1)[0], texts(2, (*COMMON[:20], 250, *COMMON[21:]))[1]]
    owner = Answers()
    open_each(target, specs, [owner] * 2)
    target.device.step(target.verifier.advance)
    assert len(owner) == 1
    target.table.clear()


def test_without_it_all_is_read_by_everybody(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: nobody ever waits."""
    monkeypatch.setattr(sharing.ReadOnce, "waits", lambda *_: False)
    _, num_rows = said(target, texts(4), [Answers()] * 4)
    assert num_rows == 4 * 111
