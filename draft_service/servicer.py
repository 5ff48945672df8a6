"""DraftService: reads a message, checks its fields, and hands it to the draft's sessions on the device thread."""

from collections.abc import Awaitable, Sequence
from functools import partial

from draft_service.sessions import DraftSessions
from draft_service.states import Search, Wanted
from outrider.drafters.model_drafter import choose_drafter
from outrider.engine.growth import check_rows
from outrider.errors import InvalidRequest, check_range, check_token_ids
from outrider.grammar import Grammar, GrammarEngine
from outrider.model_service.incoming import Arrived, Job
from outrider.model_service.link import LinkServicer
from outrider.model_service.outbox import Outbox
from outrider.model_service.servicer import MAX_DRAFT_COUNT
from outrider.rpc import channels
from outrider.rpc.messages.session import live_beams_from, search_spec_from, spec_from
from outrider.rpc.messages.tree import MAX_BRANCHES, shape_from, write_branches, write_tree
from outrider.token_tree import Branch, TokenTree
from outrider.v1 import draft_service_pb2 as pb
from outrider.v1.draft_service_pb2_grpc import DraftServiceServicer, add_DraftServiceServicer_to_server

# A request has few drafts. Their lanes, of which each has many, stay within the 64 bits of a key.
MAX_LANE = 2**16 - 1


class DraftServicer(LinkServicer[pb.ProposeRequest, DraftSessions], DraftServiceServicer):  # type: ignore[misc]
    """Serves DraftService over the sessions of one model."""

    answer_type = pb.DraftServiceLinkResponse

    @property
    def services(self) -> channels.Services:
        return channels.service(pb.DESCRIPTOR, "DraftService", partial(add_DraftServiceServicer_to_server, self))

    def compiled(self, grammars: GrammarEngine, text: str, salt: bytes, output: Sequence[int]) -> Awaitable[Grammar]:
        # Guesses may fail, so what others have asked of the same grammar may be in its way.
        return grammars.compiled(text, salt)

    def job(self, message: Arrived[pb.ProposeRequest], earlier: Sequence[int], owner: Outbox) -> Job:
        """Opens a session or moves it forward; raises InvalidRequest and Unsupported."""
        request, fence, arrived_ns = message.request, message.fence, message.arrived_ns
        if request.HasField("open"):
            size, live = self._facts.vocabulary_size, self._search(request.open, "open.beams")
            if live is None:
                is_compiled = message.grammar is not None
                spec = spec_from(request.open.session, fence.base_len, size, earlier, is_compiled=is_compiled)
            else:
                spec = search_spec_from(request.open.session, live.beams, fence.base_len, size, earlier)
            wanted = self._wanted("open", request.open, arrived_ns, live)
            rule, offers = spec.acceptance.rule, self._facts.drafters
            drafter = choose_drafter(request.open.drafter, rule, offers, "open.drafter")
            lane = check_range("open.lane", request.open.lane, 0, MAX_LANE)
            return partial(self._sessions.open, fence, spec, wanted, owner, drafter, lane, message.grammar)
        advance = request.advance
        live = self._search(advance, "advance.beams")
        if len(advance.token_ids) >= fence.base_len:
            count, limit = f"{len(advance.token_ids)} tokens", f"fewer than {fence.base_len} tokens"
            raise InvalidRequest("advance.token_ids", count, limit)
        token_ids = check_token_ids("advance.token_ids", advance.token_ids, self._facts.vocabulary_size)
        wanted = self._wanted("advance", advance, arrived_ns, live)
        return partial(self._sessions.advance, fence, token_ids, wanted, owner)

    def _wanted(
        self, action: str, message: pb.DraftOpen | pb.DraftAdvance, arrived_ns: int, search: Search | None
    ) -> Wanted:
        """Raises InvalidRequest."""
        draft_count = check_range(f"{action}.draft_count", message.draft_count, 0, MAX_DRAFT_COUNT)
        if not message.HasField("shape"):
            if isinstance(message, pb.DraftOpen):
                return Wanted(draft_count, arrived_ns, search=search)
            branch_count = check_range("advance.branch_count", message.branch_count, 0, MAX_BRANCHES)
            return Wanted(draft_count, arrived_ns, None, search, branch_count, message.went_on)
        if isinstance(message, pb.DraftAdvance) and (message.branch_count or message.went_on):
            raise InvalidRequest(f"{action}.shape", "present", "absent together with branch_count or went_on")
        if search is not None:
            raise InvalidRequest(f"{action}.shape", "present", "absent for a beam search, which has a shape of its own")
        shape = shape_from(message.shape, f"{action}.shape")
        check_rows(shape, draft_count, f"{action}.shape", f"{action}.draft_count")
        return Wanted(draft_count, arrived_ns, shape)

    def _search(self, message: pb.DraftOpen | pb.DraftAdvance, field: str) -> Search | None:
        if not message.HasField("beams"):
            return None
        beams = live_beams_from(message.beams, field, self._facts.vocabulary_size)
        return Search(message.beams.width, beams)

    def fill(self, response: pb.ProposeResponse, answer: TokenTree | list[Branch]) -> None:
        if isinstance(answer, TokenTree):
            write_tree(response.proposal, answer, with_logprobs=True)
        else:
            write_branches(response.branches, answer)
