"""What all requests of a gateway share: links, tokenizer, policy. Makes the parts of a request, and keeps none."""

from dataclasses import dataclass

from gateway.audit import ShadowAudit
from gateway.deadline import DraftDeadline
from gateway.draft_session import AbsentDraftSession, RemoteDraftSession
from gateway.links import ModelInfo
from gateway.pace import Pace
from gateway.patience import Expiry, Patience
from gateway.policy import SpeculationPolicy
from gateway.replicas import Replicas
from gateway.requests import GenerationPlan, ServingLimits
from gateway.rounds import TokenLog
from gateway.speculation import DraftSession, TargetSession
from gateway.target_session import RemoteTargetSession
from gateway.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Backend:
    """The services behind the gateway; draft is None when none is configured."""

    tokenizer: Tokenizer
    target: Replicas
    draft: Replicas | None
    policy: SpeculationPolicy
    deadline: DraftDeadline
    patience: Patience
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

    def pace(self, plan: GenerationPlan, target: ModelInfo) -> Pace:
        """The planner of a request's rounds."""
        return Pace(self.policy, plan.draft_count, plan.spec.max_len, target.max_draft_count)

    def target_session(
        self, plan: GenerationPlan, log: TokenLog, session_id: bytes, target: ModelInfo, expiry: Expiry
    ) -> TargetSession:
        """A session that opens with its first round, on this target or a replica of it."""
        return RemoteTargetSession(self.target, self.patience, plan.spec, log, session_id, target.model_hash, expiry)

    def draft_session(
        self, plan: GenerationPlan, log: TokenLog, session_id: bytes, expiry: Expiry, *, warm: bool
    ) -> DraftSession:
        """A draft session that reads the prompt at once when warm."""
        if self.draft is None:
            return AbsentDraftSession()
        return RemoteDraftSession(self.draft, self.deadline, plan.spec, log, session_id, warm, plan.drafter, expiry)
