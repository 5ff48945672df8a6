"""Sessions that ask for log-probabilities, and what comes of it, for tests of the target service without a thread."""

from collections.abc import Sequence
from dataclasses import replace

from helpers import spec_of
from stepped_target import Target

from outrider.engine.runner import ModelRunner
from outrider.errors import OutriderError
from outrider.parameters import SessionSpec, TokenLogprob
from target_service.sessions import Answer

COUNT = 5
Entries = list[TokenLogprob]


def asking(spec: SessionSpec, count: int = COUNT) -> SessionSpec:
    """The same request with all log-probabilities."""
    return replace(spec, logprob_count=count, prompt_logprobs=True)


def entries_of(answers: Sequence[Answer], spec: SessionSpec) -> tuple[Entries, Entries]:
    """The prompt's entries, which only the first verdict carries, and one for each committed token."""
    verdicts = [answer.verdict for answer in answers if answer.verdict]
    assert all(len(verdict.logprobs) == len(verdict.token_ids) for verdict in verdicts)
    assert len(verdicts[0].prompt_logprobs) == spec.prompt_len - 1
    assert not any(verdict.prompt_logprobs for verdict in verdicts[1:])
    return list(verdicts[0].prompt_logprobs), [entry for verdict in verdicts for entry in verdict.logprobs]


def all_entries(answers: Sequence[Answer], spec: SessionSpec) -> Entries:
    """The prompt's entries, and those of the committed tokens behind them."""
    prompt, output = entries_of(answers, spec)
    return prompt + output


def first_entries(answers: Sequence[Answer | OutriderError]) -> Entries:
    """The prompt's entries of the first answer."""
    assert isinstance(answers[0], Answer)
    assert answers[0].verdict is not None
    return list(answers[0].verdict.prompt_logprobs)


def of_text(runner: ModelRunner, token_ids: Sequence[int]) -> Entries:
    """One entry for each token but the first, of a session whose prompt is the whole text."""
    target = Target(runner)
    target.open(asking(spec_of(token_ids, 600)))
    [answer] = target.run()
    target.table.clear()
    assert answer.verdict is not None
    return list(answer.verdict.prompt_logprobs)


def plain_tokens(runner: ModelRunner, spec: SessionSpec) -> list[int]:
    """The tokens of the same request without log-probabilities and proposals."""
    alone = Target(runner)
    alone.open(replace(spec, logprob_count=None, prompt_logprobs=False), budget=spec.max_len)
    alone.run()
    tokens = list(alone.tokens)
    alone.table.clear()
    return tokens
