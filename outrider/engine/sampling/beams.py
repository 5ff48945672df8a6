"""One step of beam search, from the logits after the live beams: a pure function, the same for draft and target.

It is that of transformers: of all (beam, token) with the largest sums twice as many as there are beams, or more where
several tokens end a sequence. Of the first `width` those that end become finished sequences; the first `width` of all
that do not end go on.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from outrider.beams import BeamStep, Candidate
from outrider.engine.devices import send


def select(
    logprobs: Tensor, scores: Sequence[float], width: int, end_token_ids: frozenset[int], *, is_last: bool = False
) -> BeamStep:
    """The step after live beams with these sums, from their log-probabilities [B, V] float32.

    Sums are float32; of equal ones that of the lower beam comes first, then the lower token. With is_last every
    sequence ends. A token of probability 0 is never taken. Raises ValueError where no other is left.
    """
    sums = (logprobs + send(np.array(scores, dtype=np.float32)[:, None], logprobs.device)).flatten()
    count = min(width * (1 + max(1, len(end_token_ids))), len(sums))
    # topk takes any of equal ones, so it only says how large a sum has to be.
    places = (sums >= sums.topk(count).values[-1]).nonzero().flatten()
    largest, order = sums[places].sort(descending=True, stable=True)
    vocabulary_size = logprobs.shape[1]
    candidates = [
        Candidate(place // vocabulary_size, place % vocabulary_size, score)
        for score, place in zip(largest[:count].tolist(), places[order[:count]].tolist(), strict=True)
        if score > -torch.inf
    ]
    if not candidates:
        raise ValueError("no token has a probability behind any beam")
    ended = [each for each in candidates[:width] if is_last or each.token_id in end_token_ids]
    live = [] if is_last else [each for each in candidates if each.token_id not in end_token_ids]
    return BeamStep(tuple(live[:width]), tuple(ended))
