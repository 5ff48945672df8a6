"""Bytes of the messages of one speculative round, as the gateway counts them: request and answer of each service.

Builds the messages that services and gateway build, from the same functions, and measures their encoding.
"""

from dataclasses import dataclass

from outrider.rpc import messages
from outrider.rpc.fencing import ComputeTimes, Fence
from outrider.token_tree import TokenTree
from outrider.v1 import draft_service_pb2 as draft_pb
from outrider.v1 import target_service_pb2 as target_pb

# Of the length and size that they have in a live system.
SESSION_ID = bytes(range(16))
INSTANCE_ID = 2**64 - 1
NUMERICS_ID = "cpu-bfloat16-native-v4"
TIMES = ComputeTimes(queue_us=999, compute_us=99_999, forward_count=9)


@dataclass(frozen=True, slots=True)
class HopBytes:
    """Both hops of a round."""

    draft: int
    target: int

    @property
    def most(self) -> int:
        """The larger one."""
        return max(self.draft, self.target)


def hop_bytes(tree: TokenTree, base_len: int) -> HopBytes:
    """Of a round that proposes a tree behind base_len tokens, all accepted here and in the round before."""
    request = Fence(SESSION_ID, 9, base_len)
    fence, answer = messages.fence_message(request), messages.fence_message(request, INSTANCE_ID)
    proposal, times = messages.tree_message(tree), messages.times_message(TIMES)
    tokens = (*tree.token_ids, *tree.token_ids[-1:])
    verdict = target_pb.Verdict(
        accepted_rows=range(1, len(tree) + 1), next_token_id=tokens[-1], evaluated_count=len(tree)
    )
    advance = draft_pb.DraftAdvance(token_ids=tokens, draft_count=len(tree))
    step = target_pb.TargetStep(proposal=proposal, plain_budget=len(tree))
    return HopBytes(
        draft=draft_pb.ProposeRequest(fence=fence, advance=advance).ByteSize()
        + draft_pb.ProposeResponse(
            fence=answer, proposal=proposal, cached_len=base_len, numerics_id=NUMERICS_ID, times=times
        ).ByteSize(),
        target=target_pb.VerifyRequest(fence=fence, step=step).ByteSize()
        + target_pb.VerifyResponse(
            fence=answer, verdict=verdict, cached_len=base_len, numerics_id=NUMERICS_ID, times=times
        ).ByteSize(),
    )
