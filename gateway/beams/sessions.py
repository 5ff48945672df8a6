"""The sessions of a beam search with target and draft: those of other requests, with beams in place of one sequence."""

from typing import cast

from gateway.beams.record import BeamRecord
from gateway.rounds.round import GuessRequest, Proposal, Verdict
from gateway.sessions.draft import RemoteDraftSession
from gateway.sessions.draft_opening import DrafterSeat, DraftOpening
from gateway.sessions.link import opening_of
from gateway.sessions.peer import ServicePeer
from gateway.sessions.target import RemoteTargetSession
from gateway.sessions.target_opening import TargetOpening
from outrider.beams import BeamStep, LiveBeam, split
from outrider.errors import InvalidRequest
from outrider.parameters import SessionSpec
from outrider.rpc.messages.round import steps_from
from outrider.rpc.messages.session import live_beams_message
from outrider.rpc.messages.tree import write_tree
from outrider.token_tree import TokenTree, TreeShape
from outrider.v1 import draft_service_pb2, target_service_pb2, types_pb2


class BeamTargetOpening(TargetOpening):
    """One opening of a search on a target; every pass is asked for."""

    def __init__(self, peer: ServicePeer, spec: SessionSpec, record: BeamRecord, fence: types_pb2.Fence) -> None:
        super().__init__(peer, spec, record, fence)
        self._record = record
        self.steps: tuple[BeamStep, ...] = ()
        """Steps of the last answer."""

    def send_step(self, proposal: Proposal, plain_budget: int, _own: GuessRequest) -> None:
        """Opens with all beams, or asks for a pass; a search has neither budget nor own guesses."""
        message = self._next_message(plain_budget)
        step, parts = message.open.step if self.is_opening else message.step, list[types_pb2.OpenPart]()
        write_tree(step.proposal, proposal.tree)
        if self.is_opening:
            session, parts = opening_of(self._spec, self._record)
            message.open.session.CopyFrom(session)
            message.open.beams.CopyFrom(live_beams_message(self._record.search.width, self._record.live))
        self.send(*(target_service_pb2.VerifyRequest(fence=message.fence, part=part) for part in parts), message)

    async def receive(self, until_s: float) -> target_service_pb2.VerifyResponse:
        response = await super().receive(until_s)
        self.steps = steps_from(response.verdict.beam_steps)
        return response


class BeamTargetSession(RemoteTargetSession):
    """A search on a target service, which outlives targets like any session."""

    def _opened_on(self, peer: ServicePeer) -> BeamTargetOpening:
        return BeamTargetOpening(peer, self._spec, cast("BeamRecord", self._log), self._fence())

    def _change_place(self) -> None:
        """Stays with its target to the end of that: beams are not tokens of one sequence, which another could read."""

    async def advance(self, proposal: Proposal) -> tuple[Verdict, tuple[BeamStep, ...]]:
        """The steps of a pass, whatever happens to targets meanwhile; raises as `verify`."""
        verdict = await self.verify(proposal, 0)
        return verdict, cast("BeamTargetOpening", self._opening).steps


class BeamDraftOpening(DraftOpening):
    """One opening of a search on a draft, which gets all beams each time."""

    def __init__(
        self, peer: ServicePeer, spec: SessionSpec, record: BeamRecord, session_id: bytes, seat: DrafterSeat
    ) -> None:
        super().__init__(peer, spec, record, session_id, seat)
        self._record = record

    def ask(self, fence: types_pb2.Fence, asked: GuessRequest) -> None:
        self._asked = fence.epoch, fence.base_len
        is_open, self.known_len = self.known_len > 0, len(self._record)
        beams = live_beams_message(self._record.search.width, self._record.live)
        if is_open:
            message = draft_service_pb2.ProposeRequest(fence=fence)
            message.advance.draft_count = asked.count
            message.advance.beams.CopyFrom(beams)
            self.send(message)
            return
        session, parts = opening_of(self._spec, self._record)
        opening = draft_service_pb2.DraftOpen(
            session=session, draft_count=asked.count, drafter=self._seat.drafter, beams=beams
        )
        messages = [draft_service_pb2.ProposeRequest(fence=fence, part=part) for part in parts]
        self.send(*messages, draft_service_pb2.ProposeRequest(fence=fence, open=opening))

    def proposal(
        self,
        response: draft_service_pb2.ProposeResponse,
        draft_count: int,
        caught_up_count: int,
        wait_us: int,
        shape: TreeShape | None = None,
    ) -> Proposal:
        num_rows = len(self._record.live) + draft_count
        return super().proposal(response, num_rows, caught_up_count, wait_us, shape)

    def _fault_of(self, tree: TokenTree, _shape: TreeShape) -> str:
        try:
            trees = split(tree, last_tokens(self._record.live))
        except InvalidRequest as error:
            return f"that is malformed: {error.message}"
        depth, room = max(max(each.tree.depths) for each in trees), self._record.room
        return f"{depth} tokens deep where at most {room} fit" if depth > room else ""


class BeamDraftSession(RemoteDraftSession):
    """A search on a draft service, whose faults cost no request anything."""

    def _opened_on(self, peer: ServicePeer) -> BeamDraftOpening:
        return BeamDraftOpening(peer, self._spec, cast("BeamRecord", self._log), self._session_id, self._seat)

    def change_place(self, *, is_guessing: bool, is_ahead: bool = False) -> None:
        """Stays with its draft: beams are read anew after every pass, so no other one could follow meanwhile."""


def last_tokens(live: tuple[LiveBeam, ...]) -> list[int]:
    """Last token of each beam, with which a proposal begins."""
    return [beam.token_ids[-1] for beam in live]
