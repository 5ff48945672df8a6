"""What all requests of a gateway share: links, tokenizer, policy."""

from dataclasses import dataclass

from gateway.generation.audit import ShadowAudit
from gateway.generation.request import ServingLimits
from gateway.rounds.policy import SpeculationPolicy
from gateway.sessions.link import ModelInfo
from gateway.sessions.replicas import Replicas
from gateway.sessions.timeouts import DraftDeadline, TargetTimeouts
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
