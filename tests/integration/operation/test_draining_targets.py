"""A target drains under running streams: each goes on with another one, which has read its tokens before it comes.

Nothing of what the streams say is another for it.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from support.basics import eventually, slow
from support.stack import DRAFT, PATIENT, Answer, HaltedTarget, RunningStack, running_stack

from gateway.sessions import target_move
from gateway.sessions.placement import MovedFor
from outrider.v1 import generation_service_pb2 as pb
from outrider.v1 import types_pb2
from target_service.sessions import TargetSessions

STORY = " One day she went to the park with her mother, and they saw a big dog that was very happy to play with a ball."
LONG = {"max_tokens": 160, "ignore_eos": True}
PLAIN = {"draft_count": 0}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, **LONG},
    "drawn": {"temperature": 0.8, **LONG},
    "unasked": {"temperature": 0.8, **LONG, **PLAIN},
    "numbers": {"temperature": 0.8, "logprob_count": 2, **LONG},
    "samples": {"temperature": 0.8, "sample_count": 2, **LONG},
    "grammar": {"constraint": pb.Constraint(regex="[a-z ]{300}"), "max_tokens": 160},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.2, **LONG},
    "salted": {"temperature": 0.8, "cache_salt": "mine", **LONG},
}
TESTED = {"temperature": 0.8, "draft_count": 4, "rule": types_pb2.ACCEPTANCE_RULE_RATIO, "drafter": "model", **LONG}
Said = dict[int, list[tuple[int, float]]]


@pytest.fixture(autouse=True)
def looking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions look before every round, and none is so nearly done that it stays, however slow the machine is."""
    monkeypatch.setattr(target_move, "LOOK_S", 0.0)
    monkeypatch.setattr(target_move, "_reading_us", lambda there, wish: 0.0)


def said(answer: Answer) -> Said:
    """Tokens of each sample, with their log-probabilities."""
    samples: Said = {}
    for each in answer.rounds:
        tokens = [(token.token_id, token.logprob.logprob) for token in each.tokens]
        samples.setdefault(each.sample_index, []).extend(tokens)
    return samples


async def asked(stack: RunningStack, number: int, **fields: Any) -> Answer:
    """The answer to one of the streams."""
    return await stack.generate(text=f"{number} dogs" + 6 * STORY, seed=number, **fields)


async def plain(requests: Sequence[Mapping[str, Any]]) -> list[Said]:
    """What a target that nobody drains says."""
    async with running_stack(gateway=PATIENT) as stack:
        found = await asyncio.gather(*(asked(stack, number, **each) for number, each in enumerate(requests)))
    return [said(each) for each in found]


class Draining:
    """A stack of two targets, of which the one with more of the streams drains in their middle."""

    def __init__(self, stack: RunningStack) -> None:
        assert stack.gateway is not None
        self.stack, self.replicas = stack, stack.gateway.backend.target
        # Where none is read for a while, none would begin.
        self.replicas.room.patience_s = self.replicas.move_room.patience_s = 0.0
        # The first ones stay, the second ones leave, once that is decided.
        self.targets, self.peers = stack.targets, list(self.replicas.peers)
        self.halted = [HaltedTarget(stack, target=each) for each in self.targets]
        self._opens: list[tuple[TargetSessions, bytes, int, int]] = []
        self.num_leaving = self._num_staying = 0

    def note_opens(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Notes each open: its session, its tokens, and how many of them are to be read."""
        open_it = TargetSessions._open

        def noted(sessions: TargetSessions, fence: Any, *rest: Any) -> Any:
            held = open_it(sessions, fence, *rest)
            unread = len(held.session) - held.session.cached_len
            self._opens.append((sessions, fence.session_id, len(held.session), unread))
            return held

        monkeypatch.setattr(TargetSessions, "_open", noted)

    @property
    def opens(self) -> list[tuple[bytes, int, int]]:
        """Those at the target that stays."""
        stays = self.targets[0].servicer._sessions
        return [noted for sessions, *noted in self._opens if sessions is stays]  # type: ignore[misc]

    async def begin(self, requests: Sequence[Mapping[str, Any]]) -> "asyncio.Future[list[Answer]]":
        """The streams, of which most run at the target that has begun to drain; it has read all that it has."""
        await eventually(lambda: all(peer.load for peer in self.peers))
        asking = asyncio.gather(*(asked(self.stack, number, **each) for number, each in enumerate(requests)))
        num_samples = sum(each.get("sample_count", 1) for each in requests)
        await eventually(lambda: sum(peer.book.session_count for peer in self.peers) == num_samples)
        # Where they went is a matter of what rows cost when the targets began, on a machine that may have been busy.
        if self.peers[0].book.session_count > self.peers[1].book.session_count:
            for pair in (self.targets, self.peers, self.halted):
                pair.reverse()
        self._num_staying, self.num_leaving = (peer.book.session_count for peer in self.peers)
        while self.peers[1].book.waiting_tokens:
            await self.halted[1].make(1)
        self.targets[1].servicer.drain(600.0)
        await eventually(lambda: self.peers[1].is_draining)
        return asking

    async def kill(self, target: Any) -> None:
        """Ends a target in its middle; after that there is another one in its place."""
        await self.stack.restart_target(self.stack.targets.index(target))

    async def all_opened(self) -> None:
        """Lets the target that drains go on until each of its streams is to be read by the other one, which waits."""
        while self.peers[0].book.session_count < self._num_staying + self.num_leaving:
            await self.halted[1].make(1)
            # Those whose turn it is have opened their sessions, or a stream might end before it comes to that.
            await eventually(lambda: not len(self.replicas.move_room))

    async def all_read(self) -> None:
        """Lets the other one read."""
        self.halted[0].let_go()
        await eventually(lambda: self.peers[0].book.waiting_tokens == 0)


STACKS: dict[str, dict[str, Any]] = {
    "drafted": {"gateway": PATIENT},
    "ahead": {"gateway": {**PATIENT, "branches": 16}},
    "hosted": {"draft": None, "target_options": {"draft_model": DRAFT}},
}


@pytest.mark.parametrize("name", ["drafted", *slow("ahead", "hosted")])
async def test_every_stream_of_a_target_that_drains_goes_on_elsewhere(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it asks for: nothing is opened again after a fault, and what its new target has to read when it comes is
    what was said since that began to read.
    """
    requests = [*KINDS.values()]
    expected = await plain([each | PLAIN for each in requests])
    async with running_stack(further_targets=1, **STACKS[name]) as stack:
        here = Draining(stack)
        here.note_opens(monkeypatch)
        asking = await here.begin(requests)
        assert here.num_leaving >= 2
        await here.all_opened()
        await here.all_read()
        here.halted[1].let_go()
        found = await asking
        assert [said(each) for each in found] == expected
        assert sum(each.completion.survival.target_reopens for each in found) == 0
        assert here.replicas.moves[MovedFor.LEAVING] == here.num_leaving
        assert len(here.targets[1].table) == 0
        by_session: dict[bytes, list[tuple[int, int]]] = {}
        for session_id, length, unread in here.opens:
            by_session.setdefault(session_id, []).append((length, unread))
        moved = [each for each in by_session.values() if len(each) > 1]
        assert [len(each) for each in moved] == [2] * here.num_leaving
        assert all(unread <= max(after - before, 1) for (before, _), (after, unread) in moved)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["opened", "read"])
async def test_streams_of_a_target_that_dies_in_the_middle_of_its_moves_go_on(moment: str) -> None:
    """With what has been read for them by then; the answers are the same."""
    requests = [*KINDS.values()]
    expected = await plain([each | PLAIN for each in requests])
    async with running_stack(further_targets=1, gateway=PATIENT) as stack:
        here = Draining(stack)
        asking = await here.begin(requests)
        assert here.num_leaving >= 2
        await here.all_opened()
        if moment == "read":
            await here.all_read()
        await here.kill(here.targets[1])
        here.halted[0].let_go()
        assert [said(each) for each in await asking] == expected


@pytest.mark.slow
async def test_streams_go_on_where_they_are_when_the_other_target_dies() -> None:
    """In the middle of reading for them; none is opened again for it, but those that it had itself."""
    requests = [*KINDS.values()]
    expected = await plain([each | PLAIN for each in requests])
    async with running_stack(further_targets=1, gateway=PATIENT) as stack:
        here = Draining(stack)
        asking = await here.begin(requests)
        await here.all_opened()
        await here.kill(here.targets[0])
        here.halted[1].let_go()
        found = await asking
        assert [said(each) for each in found] == expected


async def test_a_client_that_leaves_in_the_middle_of_a_move_leaves_nothing() -> None:
    """At neither target; the stack looks at its end."""
    async with running_stack(further_targets=1, gateway=PATIENT) as stack:
        here = Draining(stack)
        asking = await here.begin([KINDS["drawn"]] * 4)
        await here.all_opened()
        asking.cancel()
        await eventually(lambda: all(peer.book.session_count == 0 for peer in here.peers))
        here.halted[0].let_go()
        here.halted[1].let_go()


@pytest.mark.slow
@pytest.mark.parametrize("draft_count", [0, 4])
async def test_tokens_under_a_rule_that_tests_guesses_stay(draft_count: int) -> None:
    """With the same guesses noise decides alike at both targets."""
    requests = [TESTED | {"draft_count": draft_count}] * 4
    expected = await plain(requests)
    async with running_stack(further_targets=1, gateway=PATIENT) as stack:
        here = Draining(stack)
        asking = await here.begin(requests)
        await here.all_opened()
        await here.all_read()
        here.halted[1].let_go()
        assert [said(each) for each in await asking] == expected
        assert here.replicas.moves[MovedFor.LEAVING] == here.num_leaving > 0
