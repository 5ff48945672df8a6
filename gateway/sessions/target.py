"""The gateway's end of a target session, which outlives the targets that serve it.

The token log can rebuild the session anywhere, so a target that is lost, hangs, forgets or miscounts costs time and no
token: the session is opened again with all tokens and the next epoch, on whichever replica is there. One opening has
one epoch; see gateway.sessions.target_opening. Guesses that a target refuses end no request: whichever drafter made
them, it is decided without them.
"""

import asyncio
import math
from contextlib import suppress
from dataclasses import replace

import structlog

from gateway.rounds.round import (
    NO_REQUEST,
    NOTHING,
    GuessRequest,
    HopCost,
    Proposal,
    TokenLog,
    Verdict,
)
from gateway.sessions.peer import SILENT_S, ServicePeer
from gateway.sessions.replicas import Placing, Replicas, need_of, wish_of
from gateway.sessions.session import MAX_DRIFT_REPAIRS, EndedTargets, RemoteSession, RetryBudget, TargetTimeouts
from gateway.sessions.target_move import TargetMoves
from gateway.sessions.target_opening import TargetOpening
from gateway.sessions.wait import Wait
from outrider.errors import InvalidRequest, NotReady, OutriderError, PeerLost, ProtocolViolation
from outrider.parameters import SessionSpec
from outrider.process import telemetry
from outrider.process.telemetry import session_prefix
from outrider.rpc.messages.round import finish_reason, logprobs_from
from outrider.v1 import target_service_pb2 as pb
from outrider.v1 import types_pb2

PROMPT_TOKEN_S = 0.02  # allowance for reading a token that is not cached, before a working target is asked again
MAX_TIMES_AS_LONG = 10  # each request that was left unanswered doubles how long the next one may be, up to this
MIN_WAIT_S = 0.001
SILENCE_S = 0.5  # on a link with a round that waits, before its target is looked at
MAX_BUDGETS = 8  # in a round, one more for each time that a target was found working in between
MAX_REFUSALS = 3  # times in a round that a target may ask for tokens which it has just been given
MAX_REFUSED_GUESSES = 3  # of one session, after which it proposes nothing any more
# Fields that are about guesses, and about those that the target's own drafter is to make.
GUESSES, BRANCHES, OWN_GUESSES = "proposal", "branches.", ("step.own_", "acknowledge.own_", "open.drafter")
MAX_UNANSWERED = 8  # times in a row that a working target may leave a request unanswered; an hour or so

log = structlog.get_logger()


class Unanswered(OutriderError):
    """A target is there, but a request of this session has no answer from it: a message was lost, or it drains."""

    reason = "UNANSWERED"


class RemoteTargetSession(RemoteSession[TargetOpening]):
    """A session on a target service; opens with the first verify and closes with the context."""

    def __init__(
        self,
        replicas: Replicas,
        timeouts: TargetTimeouts,
        spec: SessionSpec,
        token_log: TokenLog,
        session_id: bytes,
        placing: Placing,
        drafter: str = "",
        wait: Wait | None = None,
    ) -> None:
        """`placing` is where the request's sessions go.

        `drafter` guesses in the target's process wherever a target has it; `wait` hears how much of the prompt is read.
        """
        super().__init__(replicas, spec, token_log, session_id, placing.prefix)
        self._wait = wait
        self._drafter = drafter
        self._timeouts = timeouts
        self._need = need_of(spec, placing.model_hash)
        self._placing = placing
        self._numerics_id = placing.numerics_id
        self._home = placing.peer  # where it is opened again as long as nothing is wrong there
        self._failed: ServicePeer | None = None  # the target that served the session last, and no longer does
        self._has_drifted = False
        self._has_worked = False  # the target was found working since the session was opened on it
        self._num_unanswered = 0  # in a row
        self._num_refused = 0  # guesses that a target would not take
        self._num_opens = 0
        self._ended = EndedTargets(replicas.suspect_turn)
        self._moves = TargetMoves(replicas, spec, token_log, session_id, placing.prefix)
        self.takes_branches = True
        """Whether targets have refused no branches of this session."""
        self.went_on = False
        """Whether the target is at the verdict on the log's length by itself."""
        self._had_branches = False

    def run_ahead(self, base_len: int, branches: types_pb2.Branches, asked: GuessRequest) -> None:
        """Hands branches for the verdict on a length on to the target, unless that has been given."""
        opening = self._opening
        if opening is not None and base_len == len(self._log) and self.takes_branches and not opening.is_opening:
            opening.run_ahead(base_len, branches, asked)

    @property
    def outstanding(self) -> int:
        return self._opening.outstanding if self._opening is not None else 0

    @property
    def drafter(self) -> str:
        """The drafter that guesses in the target's process; empty where there is none."""
        return self._opening.drafter if self._opening is not None else self._drafter

    async def __aexit__(self, *exit_: object) -> None:
        self._ended.clear()
        self._moves.end(self._fence())
        await super().__aexit__(*exit_)

    async def verify(self, proposal: Proposal, plain_budget: int, own: GuessRequest = NO_REQUEST) -> Verdict:
        """Returns the verdict on the log's length, whatever happens to targets within the budget for that.

        Raises PeerLost after it, and CacheFull and the like when a target says so.
        """
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        self._change_place()
        opens, repairs, num_refused = max(self._num_opens, 1), self._num_repairs, self._num_refused
        is_left_out = num_refused >= MAX_REFUSED_GUESSES and bool(proposal.tree)
        if is_left_out:
            proposal = NOTHING
        opening, response = await self._exchange(proposal, plain_budget, own, started_s)
        wait_us = int(1e6 * (loop.time() - started_s))
        verdict, times = response.verdict, response.times
        self._numerics_id = opening.link.numerics_id
        expected = opening.book.answered(self._session_id, len(self._log), verdict.prefix_len, times.compute_us)
        # Where the prompt's log-probabilities are wanted, nothing is looked for.
        if expected is not None and not self._spec.prompt_logprobs:
            self._replicas.prefix_hits.add(expected, verdict.prefix_len)
        accepted_rows = tuple(verdict.accepted_rows[:])
        next_token_id = verdict.next_token_id if verdict.HasField("next_token_id") else None
        # After a verdict a target has cached all committed tokens but the last one.
        committed_len = len(self._log) + len(accepted_rows) + (next_token_id is not None)
        if response.cached_len != committed_len - 1 and self._num_repairs < MAX_DRIFT_REPAIRS:
            self._has_drifted = True
            self._log_event("cache drift", cached_len=response.cached_len, committed_len=committed_len)
        had_branches, self._had_branches = self._had_branches, opening.is_ahead(response)
        self.went_on = self._had_branches and opening.goes_on(response)
        if self.went_on:
            opening.allow(committed_len + 1)
        # Log-probabilities that were not asked for have no reader.
        wants_logprobs = self._spec.logprob_count is not None
        if wants_logprobs and not verdict.logprobs:
            raise ProtocolViolation("a verdict came without the log-probabilities that the session asked for")
        return Verdict(
            base_len=response.fence.base_len,
            accepted_rows=accepted_rows,
            next_token_id=next_token_id,
            finish_reason=finish_reason(verdict.finish_reason),
            evaluated_count=verdict.evaluated_count,
            compute_us=times.compute_us,
            forward_count=times.forward_count,
            row_count=times.row_count,
            prompt_row_count=times.prompt_row_count,
            session_count=opening.link.session_count,
            numerics_id=self._numerics_id,
            address=opening.peer.address,
            hop=HopCost(times.queue_us, wait_us, opening.take_bytes()),
            reopens=self._num_opens - opens,
            drift_repairs=self._num_repairs - repairs,
            logprobs=logprobs_from(verdict.logprobs) if wants_logprobs else (),
            prompt_logprobs=logprobs_from(verdict.prompt_logprobs) if wants_logprobs else (),
            prefix_len=verdict.prefix_len,
            own=opening.own_proposal(response),
            refused_guesses=is_left_out or self._num_refused > num_refused,
            is_of_branch=verdict.is_of_branch and bool(verdict.proposal.token_ids),
            had_branches=had_branches,
        )

    async def _exchange(
        self, proposal: Proposal, plain_budget: int, own: GuessRequest, started_s: float
    ) -> tuple[TargetOpening, pb.VerifyResponse]:
        """The answer of the first target that gives a verdict, and the opening that it came by.

        An attempt on one opening ends in one of six ways:
        1. The target gives a verdict.
        2. The attempt raises Unanswered: the target is there, and the session is better off with a new opening at once.
        3. The target is lost or hangs: another one takes the session over, after a pause and within a retry budget.
           Where the target that is left was found working in between, in 2 as well, the budget begins anew: it is for
           the time without a target.
        4. The target lacks tokens, because it has forgotten the session: it is given all of them again, a few times.
        5. The target refuses what was guessed, or what its own drafter is to guess, and with it the session, which is
           opened again without that. Whether it does depends on no token that a right drafter could have guessed.
        6. The target ends before it has read the session, which may be the reason: as 3, but while no other such
           session is read. Where that one ends too, it raises TargetsEnded.
        """
        budget, num_budgets = RetryBudget(self._timeouts.rebuild_budget_s, started_s), 1
        num_refusals = 0
        while True:
            if self._has_drifted:
                await self._drop_cache()
            opening = self._opening or await self._open(budget.until_s)
            try:
                response = await self._attempt(opening, proposal, plain_budget, own)
                if response.WhichOneof("answer") == "verdict":  # 1
                    self._num_unanswered = 0
                    self._ended.clear()
                    opening.peer.breaker.answered()
                    return opening, response
            except (Unanswered, PeerLost, NotReady) as error:
                self._abandon(error)
                loop = asyncio.get_running_loop()
                if self._has_worked and num_budgets < MAX_BUDGETS:
                    budget, num_budgets = RetryBudget(self._timeouts.rebuild_budget_s, loop.time()), num_budgets + 1
                if not isinstance(error, Unanswered):  # 3
                    # Another session may try this target, wherever this one goes on.
                    opening.peer.breaker.left(self._session_id)
                    opening.peer.report_lost(opening.link)
                    await asyncio.sleep(budget.pause_s(error, loop.time()))
                    if opening.is_opening and opening.link.end is not None:  # 6
                        self._ended.note(opening.peer, opening.link.instance_id)
                        await self._ended.judge(budget.until_s)
            except InvalidRequest as error:  # 5
                proposal, own = self._without_refused(error, proposal, own)
            else:  # 4
                num_refusals += 1
                if num_refusals > MAX_REFUSALS:
                    raise PeerLost(f"{opening.peer} lost the session {num_refusals} times in one round")
                self._abandon(PeerLost(f"{opening.peer} does not know the session"))

    def _without_refused(
        self, error: InvalidRequest, proposal: Proposal, own: GuessRequest
    ) -> tuple[Proposal, GuessRequest]:
        """What is left to be sent when a target has refused guesses; raises the error if it is about anything else."""
        field = error.metadata.get("field", "")
        if field.startswith(BRANCHES):
            # They were for the round after this one.
            self.takes_branches = False
        elif field.startswith(OWN_GUESSES) and self._drafter:
            self._drafter, own = "", NO_REQUEST
            self._num_refused += 1
        elif field.startswith(GUESSES) and proposal.tree:
            proposal = NOTHING
            self._num_refused += 1
        else:
            raise error
        self._log_event("guesses refused", reason=error.message, log_len=len(self._log))
        self._forget()
        return proposal, own

    async def _open(self, until_s: float) -> TargetOpening:
        """An opening on the request's target or else on the best that takes it; raises PeerLost when time is up, and
        WeightsGone before where the request may begin with others.
        """
        peer = self._moves.peer or self._home
        if peer is None or not self._replicas.takes(peer, self._session_id, self._need):
            wish = wish_of(self._spec, len(self._log), self._replicas.output, self._prefix, self._numerics_id)
            need, placing = self._need, self._placing
            peer = await self._replicas.wait(self._session_id, need, until_s, self._failed, wish, placing=placing)
        self._num_opens += 1
        return self._go_on_at(peer)

    def _go_on_at(self, peer: ServicePeer) -> TargetOpening:
        """Ends the opening that there is, and goes on by a new one, which takes over what was read for a move there."""
        opening = self._opened_next(peer)
        self._forget()
        peer.breaker.enter(self._session_id)
        if not self._moves.end(self._fence(), opening):
            opening.book.opened(self._session_id, len(self._log), self._prefix)
        self._opening, self._home, self._has_worked = opening, peer, False
        return opening

    def _change_place(self) -> None:
        """Goes on with the target to which the session moves, once that has read it; begins a move where one is due."""
        opening, moves = self._opening, self._moves
        if opening is None or not (opening.peer.is_draining or moves.is_under_way):
            return
        need = replace(self._need, numerics_id=self._numerics_id)
        if moves.is_under_way:
            peer = moves.arrived(need, self._fence())
            if peer is not None:
                self._go_on_at(peer)
        elif moves.due(opening.peer, need):
            timeout_s = self._timeouts.answer_s + PROMPT_TOKEN_S * len(self._log)
            moves.begin(need, self._opened_next, timeout_s)

    def _opened_next(self, peer: ServicePeer) -> TargetOpening:
        self._epoch += 1
        return self._opened_on(peer)

    def _opened_on(self, peer: ServicePeer) -> TargetOpening:
        return TargetOpening(peer, self._spec, self._log, self._fence(), self._drafter, self._wait)

    async def _attempt(
        self, opening: TargetOpening, proposal: Proposal, plain_budget: int, own: GuessRequest
    ) -> pb.VerifyResponse:
        """Makes one request and takes its answer. The request is repeated ever more seldom, which fencing makes safe.

        What a look at the target finds meanwhile, `_judge` decides on.
        """
        loop, deadline = asyncio.get_running_loop(), self._timeouts.deadline.of(opening.peer)
        deadline_s = deadline.seconds()
        now_s = started_s = loop.time()
        was_opening, was_silent = opening.is_opening, False
        allowance_s = deadline_s + PROMPT_TOKEN_S * len(self._log) * was_opening
        ask_at_s, num_asked = started_s, 0
        while True:
            if now_s >= ask_at_s:
                send = opening.send_step if num_asked else opening.send_next
                send(proposal, plain_budget, own)
                ask_at_s, num_asked = now_s + 2**num_asked * allowance_s, num_asked + 1
            wait_s = min(deadline_s, max(ask_at_s - now_s, MIN_WAIT_S))
            found = await self._receive(opening, now_s + wait_s, min(SILENCE_S, deadline_s))
            if isinstance(found, pb.VerifyResponse):
                if num_asked == 1 and not was_opening:
                    # Prompts and repetitions say nothing about how long a round takes.
                    deadline.observe(loop.time() - started_s)
                return found
            was_silent = self._judge(opening, found, started_s, allowance_s, was_silent=was_silent)
            now_s = loop.time()

    async def _receive(
        self, opening: TargetOpening, until_s: float, silence_s: float
    ) -> pb.VerifyResponse | float | None:
        """The next answer, or else what the target's probe finds when its time is up; or before, when nothing at all
        has come on the link for so long: asking costs a message, and what is lost is found out sooner.
        """
        loop, link = asyncio.get_running_loop(), opening.link
        began_s = loop.time()
        while (look_at_s := min(until_s, max(link.spoke_s, began_s) + silence_s)) > loop.time():
            with suppress(TimeoutError):
                return await opening.receive(look_at_s)
        probe = opening.peer.probe.stalled_s(link)
        probe.add_done_callback(lambda _: opening.wake())
        while not probe.done():
            with suppress(TimeoutError):
                return await opening.receive(loop.time() + silence_s)
        return probe.result()

    def _judge(
        self, opening: TargetOpening, stalled_s: float | None, started_s: float, allowance_s: float, *, was_silent: bool
    ) -> bool:
        """Decides on a target that has not answered since `started_s`; returns whether it is silent, and asked again.

        1. It takes no calls. It may be draining, when its sessions go on and end with it; but the session does not wait
           for that when its allowance is over and a spare is there. Raises Unanswered.
        2. It does not answer, or its device finishes nothing: it hangs, and its breaker spares other requests from
           finding that out. Raises PeerLost; of a silent one when it `was_silent` before, unless a spare is there:
           otherwise there is nothing to be won by haste, and the gateway itself may be cut off.
        3. It works, and may take its time, for a long prompt or in a full pool. After long enough a message must have
           been lost. Raises Unanswered, and PeerLost when that happens again and again.
        """
        peer, waited_s = opening.peer, asyncio.get_running_loop().time() - started_s
        if stalled_s is None:  # 1
            if waited_s >= allowance_s and self._has_spare(peer):
                raise Unanswered(f"{peer} takes no calls, and a spare is there")
        elif stalled_s > self._timeouts.stall_s:  # 2
            if math.isinf(stalled_s) and not was_silent and not self._has_spare(peer):
                self._log_event("no target speaks", service=str(peer))
                return True
            lost = PeerLost(f"{peer} does not answer requests")
            peer.breaker.failed(self._session_id, lost)
            raise lost
        else:  # 3
            peer.breaker.answered()
            self._has_worked = True
            answer_s = min(2**self._num_unanswered, MAX_TIMES_AS_LONG) * self._timeouts.answer_s
            if waited_s >= answer_s + allowance_s:
                opening.link.suspect(started_s)
                self._num_unanswered += 1
                if self._num_unanswered > MAX_UNANSWERED:
                    raise PeerLost(f"{peer} works, but leaves the session without an answer")
                raise Unanswered(f"{peer} left a request unanswered")
        return False

    def _has_spare(self, peer: ServicePeer) -> bool:
        """Whether another target would take the session that has spoken lately, be it slow to answer a question."""
        spare = self._replicas.pick(self._session_id, self._need, failed=peer)
        if spare is None or spare is peer:
            return False
        return asyncio.get_running_loop().time() - spare.link().spoke_s < SILENT_S

    async def _drop_cache(self) -> None:
        """Makes the target forget all but the first token, so that the open that follows computes the rest again."""
        self._has_drifted = False
        if self._opening is None:
            return
        self._num_repairs += 1
        self._epoch += 1
        peer = self._opening.peer
        try:
            await peer.rollback(self._fence(base_len=1), cached_len=len(self._log) - 1)
        except OutriderError as error:
            self._log_event("rollback failed", service=str(peer), reason=error.message)
        self._forget()

    def _abandon(self, error: OutriderError) -> None:
        self._log_event("target session lost", reason=error.message, log_len=len(self._log))
        if self._opening is not None:
            self._failed, self._home = self._opening.peer, None
        self._forget()

    def _log_event(self, event: str, **values: str | int) -> None:
        log.warning(event, session=session_prefix(self._session_id), **values)
        telemetry.event(event)
