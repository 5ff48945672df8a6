"""Log-probabilities of what a session says and, where wanted, of its prompt, from the logits of its steps.

Knows no rule: whichever way a token was chosen, its number is that of the row which it follows. Changes no token.
"""

from collections.abc import Sequence

from torch import Tensor

from outrider.engine.runner import ModelRunner
from outrider.engine.sampling.logprobs import row_logprobs
from outrider.engine.session import Session
from outrider.parameters import SessionSpec, TokenLogprob
from target_service.acceptance import Verdict


def of_verdict(runner: ModelRunner, spec: SessionSpec, verdict: Verdict, logits: Tensor) -> tuple[TokenLogprob, ...]:
    """One entry for each token of a verdict, from the logits of the proposal's root and rows."""
    # Each token follows the row before it, the first one the root; the bonus follows the last accepted row.
    rows = [0, *verdict.accepted_rows][: len(verdict.token_ids)]
    return tuple(_entries(runner, spec, logits[rows], verdict.token_ids))


def wants_prompt(session: Session, spec: SessionSpec) -> bool:
    """Whether the next verdict carries the prompt's log-probabilities: it stands on nothing but the prompt."""
    return spec.prompt_logprobs and len(session) == spec.prompt_len


def align(session: Session, entries: list[TokenLogprob]) -> None:
    """Lets a session's next forward begin at the first row whose number is missing in entries, before it reserves.

    entries[i] came from the row of token i. A cache that is ahead of them is computed again, which happens when the
    session had it before its prompt was asked about, or when a step has failed; a cache that was lost takes entries
    along.
    """
    if session.next_position > len(entries):
        session.free()
    del entries[session.next_position :]


def extend(
    runner: ModelRunner, session: Session, spec: SessionSpec, entries: list[TokenLogprob], logits: Tensor
) -> None:
    """Adds the numbers of the prompt's rows that a forward computed, the first of which belongs to token len(entries).

    At once, chunk by chunk, because the logits of a whole prompt may be larger than the model.
    """
    first = len(entries) + 1
    entries += _entries(runner, spec, logits, session.token_ids[first : first + logits.shape[0]])


def _entries(runner: ModelRunner, spec: SessionSpec, logits: Tensor, token_ids: Sequence[int]) -> list[TokenLogprob]:
    return row_logprobs(logits, token_ids, spec.logprob_count or 0, runner.vocabulary_size, runner.ops)
