"""Guesses of a draft service for engines that are not Outrider's; needs grpcio and protobuf alone.

    from outrider.drafting import DraftClient
    with DraftClient(["127.0.0.1:50051"]) as client:
        sequence = client.open(prompt_ids)
        [guesses] = client.guess([(sequence, 4)], timeout_s=0.05)
        sequence.extend(verified_ids)

docs/clients/engines.md is the reference; `outrider.drafting.vllm` has the proposer for vLLM.
"""

from outrider.drafting.client import DraftClient
from outrider.drafting.peer import DraftInfo, DraftLate
from outrider.drafting.sequence import DraftSequence, Guesses

__all__ = ["DraftClient", "DraftInfo", "DraftLate", "DraftSequence", "Guesses"]
