"""A running session leaves a target that drains: for which other one, and what is left, whatever fails meanwhile."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace

import pytest
from support.basics import eventually
from support.services.markov import MarkovModel, plain_decoding
from support.services.markov_services import Mischief, TargetServicer, linked

from gateway.rounds.costs import RoundCosts
from gateway.rounds.planner import Drafting, RoundPlanner
from gateway.rounds.policy import SpeculationPolicy
from gateway.rounds.round import Round, TokenLog
from gateway.rounds.tuning import TUNING
from gateway.sessions import target_move
from gateway.sessions.draft import AbsentDraftSession
from gateway.sessions.peer import ServicePeer
from gateway.sessions.placement import NO_PREFIX, NO_WISH
from gateway.sessions.replicas import Need, Placing, Replicas
from gateway.sessions.session import TargetTimeouts
from gateway.sessions.target import RemoteTargetSession
from gateway.speculation import speculate
from outrider.estimates.timing import ServiceLoad
from outrider.parameters import SamplingParameters, SessionSpec
from outrider.v1 import model_service_pb2 as model_pb

PROMPT, SEED, MAX_LEN = (3, 5), 9, 120
SPEC = SessionSpec(PROMPT, len(PROMPT), SamplingParameters(), SEED, MAX_LEN, frozenset({0}), frozenset())
SESSION_ID = b"0123456789abcdef"
NEED = Need("hash", MAX_LEN, numerics_id="markov")
TIMEOUTS = TargetTimeouts(rebuild_budget_s=10.0)


@pytest.fixture(autouse=True)
def looking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions look before every round, also after a move that has failed."""
    monkeypatch.setattr(target_move, "LOOK_S", 0.0)
    monkeypatch.setattr(target_move, "REST_S", 0.0)


@dataclass
class Pool:
    """Targets of one model, and a session that begins at the first of these."""

    targets: list[TargetServicer]
    replicas: Replicas
    links: list[ServicePeer]
    lives: list[AsyncExitStack]

    async def rounds(self) -> AsyncIterator[Round]:
        """The rounds of one request, each of one token that was asked for."""
        log = TokenLog(PROMPT)
        placing = Placing("hash", peer=self.links[0])
        target = RemoteTargetSession(self.replicas, TIMEOUTS, SPEC, log, SESSION_ID, placing)
        planner = RoundPlanner(SpeculationPolicy(), 0, MAX_LEN, max_draft_count=8, drafting=Drafting(()))
        async with aclosing(speculate(log, planner, target, AbsentDraftSession())) as rounds:
            async for committed in rounds:
                yield committed

    async def run(self, then: Callable[[], Awaitable[None]]) -> list[Round]:
        """All rounds; the first target drains after three of these, and `then` is waited for after the next one."""
        rounds: list[Round] = []
        async for committed in self.rounds():
            rounds.append(committed)
            if len(rounds) == 3:
                self.drain(0)
            elif len(rounds) == 4:
                await then()
        return rounds

    def drain(self, *numbers: int) -> None:
        """These targets have said that they are about to end."""
        for number in numbers:
            self.links[number].is_draining = True

    async def opened(self, number: int) -> None:
        """Waits until a target has been asked to read for a move."""
        await eventually(lambda: len(self.targets[number].opens) > 0)

    async def read(self, number: int) -> None:
        """Waits until the gateway has heard that a target has read for a move."""
        await eventually(lambda: self.links[number].book.waiting_tokens == 0 < self.links[number].book.session_count)

    async def check(self, rounds: list[Round], num_moves: int, num_reopens: int = 0) -> None:
        """Every token is that of plain decoding, and no target and no book has a session any more."""
        said = PROMPT + tuple(token for committed in rounds for token in committed.token_ids)
        assert said == plain_decoding(self.targets[0].model, PROMPT, SEED, MAX_LEN)
        assert sum(committed.verdict.reopens for committed in rounds) == num_reopens
        assert sum(self.replicas.moves.values()) == num_moves
        await self.check_empty()

    async def check_empty(self) -> None:
        """No target and no book has a session."""
        await eventually(lambda: not any(target.sessions for target in self.targets))
        assert [link.book.session_count for link in self.links] == [0] * len(self.links)
        assert not self.replicas.move_room


@asynccontextmanager
async def pool(num_targets: int = 2) -> AsyncIterator[Pool]:
    """All services, and links to them."""
    targets = [
        TargetServicer(model_pb.SERVICE_ROLE_TARGET, MarkovModel(), instance_id=1 + number)
        for number in range(num_targets)
    ]
    async with AsyncExitStack() as stack:
        lives = [await stack.enter_async_context(AsyncExitStack()) for _ in targets]
        links = [await life.enter_async_context(linked(target)) for life, target in zip(lives, targets, strict=True)]
        yield Pool(targets, Replicas(links), links, lives)


async def test_a_session_reads_elsewhere_while_its_target_goes_on() -> None:
    """Then it goes on there with all tokens and the first target is empty before the request ends."""
    async with pool() as here:
        rounds: list[Round] = []
        async for committed in here.rounds():
            rounds.append(committed)
            if len(rounds) == 3:
                here.drain(0)
            elif len(rounds) == 4:
                # It was about to be asked to read, and the round was the first target's.
                assert committed.verdict.address == here.links[0].address
                await here.read(1)
            elif len(rounds) == 5:
                assert committed.verdict.address == here.links[1].address
                await eventually(lambda: not here.targets[0].sessions)
        await here.check(rounds, 1)
        assert [len(target.opens) for target in here.targets] == [1, 2]
        # Whether it was asked to read before or after the fourth round came is chance.
        read, gone_on = (len(each.token_ids) - len(PROMPT) for each in here.targets[1].opens)
        assert (read in {3, 4}, gone_on) == (True, 4)


async def test_a_session_leaves_a_target_of_which_no_round_is_known() -> None:
    """What its forwards cost has been measured before the first one: a gateway has just begun."""
    async with pool() as here:
        costs = here.links[0].book.costs = RoundCosts(TUNING)
        costs.begin({1: 1000.0, 2: 1100.0}, {})
        assert here.links[0].figures(NO_WISH).round_tokens == 1.0
        await here.check(await here.run(lambda: here.read(1)), 1)


@pytest.mark.parametrize("mischief", [Mischief.FULL, Mischief.LOST, Mischief.FORGET, Mischief.BROKEN])
async def test_a_move_that_fails_costs_nothing(mischief: Mischief) -> None:
    """Whatever the other target does: the session stays, and moves when it may."""
    async with pool() as here:
        here.targets[1].mischief = {1: mischief}

        async def then() -> None:
            await eventually(lambda: here.links[1].info is not None and here.targets[1].answers == 1)

        rounds = await here.run(then)
        await here.check(rounds, 1)
        assert len(here.targets[1].opens) == 3


async def test_a_target_that_dies_while_it_reads_is_left_alone() -> None:
    """The session goes on where it is."""
    async with pool() as here:
        here.targets[1].mischief = {1: Mischief.FROZEN}

        async def then() -> None:
            await here.opened(1)
            await here.lives[1].aclose()

        rounds = await here.run(then)
        await here.check(rounds, 0)
        assert {committed.verdict.address for committed in rounds} == {here.links[0].address}


async def test_a_target_that_dies_when_it_has_read_is_left_alone() -> None:
    """What it has read is of no use any more."""
    async with pool() as here:

        async def then() -> None:
            await here.read(1)
            await here.lives[1].aclose()

        rounds = await here.run(then)
        await here.check(rounds, 0)


@pytest.mark.parametrize("has_read", [False, True])
async def test_a_session_whose_target_dies_goes_on_where_it_reads(has_read: bool) -> None:
    """Also where another target is as good and nothing is read there yet."""
    async with pool(3) as here:
        if not has_read:
            here.targets[1].mischief = here.targets[2].mischief = {1: Mischief.FROZEN}

        async def then() -> None:
            await eventually(lambda: any(target.opens for target in here.targets[1:]))
            if has_read:
                await eventually(lambda: any(target.answers for target in here.targets[1:]))
            await here.lives[0].aclose()

        rounds = await here.run(then)
        # Where it had read and was to go in the next round, nothing was lost.
        assert sum(committed.verdict.reopens for committed in rounds) + sum(here.replicas.moves.values()) == 1
        await here.check(rounds, sum(here.replicas.moves.values()), 1 - sum(here.replicas.moves.values()))
        assert sorted(len(target.opens) for target in here.targets[1:]) == [0, 2]


@pytest.mark.parametrize("moment", ["reading", "read", "moved"])
async def test_a_client_that_leaves_leaves_nothing(moment: str) -> None:
    """At neither target."""
    async with pool() as here:
        if moment == "reading":
            here.targets[1].mischief = {1: Mischief.FROZEN}
        num_rounds = 0
        async with aclosing(here.rounds()) as rounds:
            async for _ in rounds:
                num_rounds += 1
                if num_rounds == 3:
                    here.drain(0)
                elif num_rounds == 4:
                    await (here.opened(1) if moment == "reading" else here.read(1))
                    if moment != "moved":
                        break
                elif num_rounds == 5:
                    break
        await here.check_empty()
        assert sum(here.replicas.moves.values()) == (moment == "moved")


async def test_a_session_whose_targets_all_drain_stays() -> None:
    """The other one says so when it has read."""
    async with pool() as here:

        async def then() -> None:
            await here.read(1)
            here.drain(1)

        rounds = await here.run(then)
        await here.check(rounds, 0)
        assert {committed.verdict.address for committed in rounds} == {here.links[0].address}


@pytest.mark.parametrize("other", ["none", "numerics", "weights"])
async def test_a_session_stays_where_no_other_target_says_the_same(other: str) -> None:
    """Nothing is asked of a target of other numerics or weights, nor of none."""
    async with pool(1 if other == "none" else 2) as here:
        if other != "none":
            info = here.links[1].info
            assert info is not None
            changes = {"numerics_id": "other"} if other == "numerics" else {"model_hash": "other"}
            here.links[1]._info = replace(info, **changes)  # type: ignore[arg-type]
        rounds: list[Round] = []
        async for committed in here.rounds():
            rounds.append(committed)
            if len(rounds) == 3:
                here.drain(0)
        await here.check(rounds, 0)
        assert [len(target.opens) for target in here.targets] == [1, 0][: len(here.targets)]


async def test_a_session_that_is_nearly_done_stays() -> None:
    """Where its target leaves it the time, and another one would read for longer than it is expected to go on."""
    async with pool() as here:
        here_link, other = here.links
        while not here_link.book.answer_us.known:
            here_link.book.answer_us.add(1, 1_000.0)
        here_link.is_draining = True
        log = TokenLog(PROMPT * 40)
        spec = replace(SPEC, token_ids=log.tokens(), prompt_len=len(log))

        def is_due(drain_left_ms: int, prompt_token_us: float) -> bool:
            here_link.said = ServiceLoad(is_draining=True, drain_left_ms=drain_left_ms)
            other.said = ServiceLoad(
                prefill_us_per_token=prompt_token_us, came_s=asyncio.get_running_loop().time(), free_blocks=64
            )
            return target_move.TargetMoves(here.replicas, spec, log, SESSION_ID, NO_PREFIX).due(here_link, NEED)

        # 40 tokens are left, a millisecond each; 80 are to be read.
        assert is_due(60_000, 100.0)
        assert not is_due(60_000, 1_000.0)
        assert is_due(20, 1_000.0)


async def test_sessions_wait_for_their_turn_where_much_is_read_already() -> None:
    """One that would wait there for more than a second stays in the line, and goes on when the place is free."""
    async with pool() as here:
        here.drain(0)
        other, log = here.links[1], TokenLog(PROMPT)
        load = ServiceLoad(prefill_us_per_token=10_000.0, free_blocks=64, came_s=asyncio.get_running_loop().time())
        here.replicas.move_room.patience_s = 600.0
        other.said = replace(load, came_s=load.came_s + 600.0)
        other.book.opened(b"first", 110, NO_PREFIX)
        moves = target_move.TargetMoves(here.replicas, SPEC, log, SESSION_ID, NO_PREFIX)
        asked = asyncio.create_task(here.replicas.place_to_move(SESSION_ID, NEED, moves._wish(NEED)))
        await eventually(lambda: len(here.replicas.move_room) == 1)
        assert not asked.done()
        other.book.answered(b"first", 110, 0, 0)
        assert await asked is other
        other.book.closed(b"first")
