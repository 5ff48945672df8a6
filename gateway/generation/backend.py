"""What all requests of a gateway share: links, tokenizer, policy. Makes the parts of a request, and keeps none."""

from dataclasses import dataclass

from gateway.generation.audit import ShadowAudit
from gateway.generation.request import CheckedRequest, ServingLimits
from gateway.rounds.planner import RoundPlanner
from gateway.rounds.policy import SpeculationPolicy
from gateway.rounds.round import TokenLog
from gateway.sessions.draft import AbsentDraftSession, RemoteDraftSession
from gateway.sessions.link import ModelInfo
from gateway.sessions.replicas import Replicas
from gateway.sessions.target import RemoteTargetSession
from gateway.sessions.timeouts import Deadline, DraftDeadline, TargetTimeouts
from gateway.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Backend:
    """The services behind the gateway; draft is None when none is configured."""

    tokenizer: Tokenizer
    target: Replicas
    draft: Replicas | None
    policy: SpeculationPolicy
    draft_deadline: DraftDeadline
    target_timeouts: TargetTimeouts
    audit: ShadowAudit

    def limits(self, target: ModelInfo) -> ServingLimits:
        """What a request may ask for of this target."""
        return ServingLimits(
            context_len=target.context_len,
            kv_tokens=target.kv_tokens,
            vocabulary_size=target.vocabulary_size,
            eos_token_ids=target.eos_token_ids,
            max_draft_count=target.max_draft_count,
            drafters=self.draft.info.drafters if self.draft and self.draft.info else {},
        )

    def planner(self, request: CheckedRequest, target: ModelInfo) -> RoundPlanner:
        """The planner of a request's rounds."""
        return RoundPlanner(self.policy, request.draft_count, request.spec.max_len, target.max_draft_count)

    def target_session(
        self, request: CheckedRequest, log: TokenLog, session_id: bytes, target: ModelInfo, deadline: Deadline
    ) -> RemoteTargetSession:
        """A session that opens with its first round, on this target or a replica of it."""
        return RemoteTargetSession(
            self.target, self.target_timeouts, request.spec, log, session_id, target.model_hash, deadline
        )

    def draft_session(
        self, request: CheckedRequest, log: TokenLog, session_id: bytes, deadline: Deadline, *, warm: bool
    ) -> RemoteDraftSession | AbsentDraftSession:
        """A draft session that reads the prompt at once when warm."""
        if self.draft is None:
            return AbsentDraftSession()
        return RemoteDraftSession(
            self.draft, self.draft_deadline, request.spec, log, session_id, warm, request.drafter, deadline
        )
