"""TargetService: reads a message, checks its fields, and hands it to the target's sessions on the device thread."""

from collections.abc import Awaitable, Sequence
from functools import partial

from outrider.beams import cache_tokens
from outrider.drafters.drafter import GuessLimits
from outrider.drafters.model_drafter import choose_drafter
from outrider.engine.growth import check_rows
from outrider.errors import InvalidRequest, PromptTooLong, check_range
from outrider.grammar import Grammar, GrammarEngine
from outrider.model_service.incoming import Arrived, Job
from outrider.model_service.link import LinkServicer
from outrider.model_service.load import LinkLoad
from outrider.model_service.outbox import Outbox
from outrider.model_service.servicer import MAX_DRAFT_COUNT
from outrider.parameters import SessionSpec
from outrider.rpc import channels, wire
from outrider.rpc.messages.round import finish_reason_message, logprob_message, logprob_size, step_message, write_times
from outrider.rpc.messages.session import live_beams_from, search_spec_from, spec_from
from outrider.rpc.messages.tree import branches_from, shape_from, tree_from, write_tree
from outrider.v1 import target_service_pb2 as pb
from outrider.v1.target_service_pb2_grpc import TargetServiceServicer, add_TargetServiceServicer_to_server
from target_service.acceptance import TargetVerdict
from target_service.sessions import TargetSessions
from target_service.states import OpenSearch, PromptRead, PushedBranches, Step

MAX_PLAIN_BUDGET = 4096
# Of a verdict without the prompt's log-probabilities: those of its own tokens, at most 33, and far less for the rest.
OTHER_VERDICT_BYTES = 64 << 10


class TargetServicer(LinkServicer[pb.VerifyRequest, TargetSessions], TargetServiceServicer):  # type: ignore[misc]
    """Serves TargetService over the sessions of one model."""

    answer_type = pb.TargetServiceLinkResponse

    @property
    def services(self) -> channels.Services:
        return channels.service(pb.DESCRIPTOR, "TargetService", partial(add_TargetServiceServicer_to_server, self))

    def link_load(self, outbox: Outbox) -> LinkLoad:
        return LinkLoad(self.load, outbox, self._sessions.prefix_journal)

    def compiled(self, grammars: GrammarEngine, text: str, salt: bytes, output: Sequence[int]) -> Awaitable[Grammar]:
        return grammars.followed(text, salt, output)

    def job(self, message: Arrived[pb.VerifyRequest], earlier: Sequence[int], owner: Outbox) -> Job:
        """Opens a session, verifies a proposal or acknowledges; raises InvalidRequest, Unsupported, PromptTooLong."""
        request, fence, arrived_ns = message.request, message.fence, message.arrived_ns
        if request.HasField("open"):
            opening, size = request.open, self._facts.vocabulary_size
            if opening.HasField("beams"):
                live, width = live_beams_from(opening.beams, "open.beams", size), opening.beams.width
                spec = search_spec_from(opening.session, live, fence.base_len, size, earlier)
                self._check_lengths(spec, width)
                step = self._step(opening.step, arrived_ns)
                if opening.drafter:
                    raise InvalidRequest("open.drafter", opening.drafter, "empty for a beam search")
                search = OpenSearch(width, live)
                return partial(
                    self._sessions.open, fence, spec, step, owner, search=search, tells_reading=opening.tells_reading
                )
            grammar, drafter = message.grammar, opening.drafter
            spec = spec_from(opening.session, fence.base_len, size, earlier, is_compiled=grammar is not None)
            self._check_lengths(spec)
            step = self._step(opening.step, arrived_ns)
            if drafter:
                choose_drafter(drafter, spec.acceptance.rule, self._facts.drafters, "open.drafter")
            return partial(
                self._sessions.open,
                *(fence, spec, step, owner, drafter),
                grammar=grammar,
                tells_reading=opening.tells_reading,
            )
        if request.HasField("branches"):
            branches = branches_from(request.branches, self._facts.vocabulary_size, MAX_DRAFT_COUNT)
            ahead = PushedBranches(branches, request.branches.plain_on_miss, arrived_ns)
            return partial(self._sessions.run_ahead, fence, ahead, owner)
        if request.HasField("step"):
            return partial(self._sessions.step, fence, self._step(request.step, arrived_ns), owner)
        taken = request.acknowledge
        budget = check_range("acknowledge.plain_budget", taken.plain_budget, 0, MAX_PLAIN_BUDGET)
        return partial(self._sessions.acknowledge, fence, budget, arrived_ns, owner, _limits("acknowledge", taken))

    def fill(self, response: pb.VerifyResponse, answer: TargetVerdict | PromptRead) -> None:
        if isinstance(answer, PromptRead):
            response.reading.read_len = answer.read_len
            return
        verdict, hosted = response.verdict, answer.hosted
        if hosted.tree:
            write_tree(verdict.proposal, hosted.tree, with_logprobs=True, with_distributions=False)
            write_times(response.draft_times, hosted.times)
            response.caught_up_count = hosted.caught_up_count
        verdict.accepted_rows.extend(answer.accepted_rows)
        if answer.next_token_id is not None:
            verdict.next_token_id = answer.next_token_id
        verdict.finish_reason = finish_reason_message(answer.finish_reason)
        verdict.goes_on, verdict.is_of_branch = answer.goes_on, answer.is_of_branch
        verdict.evaluated_count, verdict.prefix_len = answer.evaluated_count, answer.prefix_len
        if answer.beam_steps:
            verdict.beam_steps.extend(map(step_message, answer.beam_steps))
        if answer.logprobs or answer.prompt_logprobs:
            verdict.logprobs.extend(map(logprob_message, answer.logprobs))
            verdict.prompt_logprobs.extend(map(logprob_message, answer.prompt_logprobs))

    def _check_lengths(self, spec: SessionSpec, width: int = 0) -> None:
        """Raises InvalidRequest about a request that the model or a message cannot hold, PromptTooLong as the cache."""
        facts = self._facts
        check_range("session.max_len", spec.max_len, 1, facts.context_len)
        kv_tokens = facts.block_size * facts.block_count
        num_tokens = cache_tokens(spec.prompt_len, spec.max_len, width) if width else spec.max_len
        if num_tokens > kv_tokens:
            # Filling the cache on its own, it could never end.
            message = (
                f"a request of up to {num_tokens} tokens does not fit into the key-value cache of {kv_tokens} tokens"
            )
            raise PromptTooLong(message, max_len=spec.max_len, kv_tokens=kv_tokens)
        if spec.prompt_logprobs:
            # They travel in one message.
            room = wire.MAX_MESSAGE_BYTES - OTHER_VERDICT_BYTES
            maximum = room // logprob_size(spec.logprob_count or 0, facts.vocabulary_size) + 1
            if spec.prompt_len > maximum:
                limit = f"at most {maximum} under prompt_logprobs with logprob_count {spec.logprob_count}"
                raise InvalidRequest("session.prompt_len", spec.prompt_len, limit)

    def _step(self, message: pb.TargetStep, arrived_ns: int) -> Step:
        tree = tree_from(message.proposal, self._facts.vocabulary_size, MAX_DRAFT_COUNT)
        budget = check_range("step.plain_budget", message.plain_budget, 0, MAX_PLAIN_BUDGET)
        return Step(tree, budget, arrived_ns, _limits("step", message))


def _limits(action: str, message: pb.TargetStep | pb.Acknowledge) -> GuessLimits:
    """Guesses that the session's drafter is asked for; raises InvalidRequest."""
    count = check_range(f"{action}.own_draft_count", message.own_draft_count, 0, MAX_DRAFT_COUNT)
    if not message.HasField("own_shape"):
        return GuessLimits(count)
    shape = shape_from(message.own_shape, f"{action}.own_shape")
    check_rows(shape, count, f"{action}.own_shape", f"{action}.own_draft_count")
    return GuessLimits(count, shape)
