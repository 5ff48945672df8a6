"""The same request with and without speculation through a real gateway, whose answers must be the same, id for id.

Knows nothing about where the gateway comes from.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.cli.doctor.findings import SOFTWARE, UNAVAILABLE, Finding, failed, ok, warning
from outrider.client import AsyncClient, Result, Speculation
from outrider.errors import OutriderError

CHECK = "self test"
PROMPT = "Once upon a time there was a"
# With 4 guesses a round gives at most 5 tokens, so there are at least two.
MAX_TOKENS, DRAFT_COUNT, LEAST_ROUNDS = 16, 4, 2
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Answered:
    """One answer: its tokens and its figures."""

    token_ids: tuple[int, ...]
    result: Result


@dataclass(frozen=True, slots=True)
class Outcome:
    """Both answers, or why there are none, with the exit code that belongs to it."""

    speculative: Answered | None = None
    plain: Answered | None = None
    problem: str = ""
    code: int = 0


async def gather(address: str) -> Outcome:
    """Asks a gateway twice; an error that it answers is part of what is found."""
    try:
        async with AsyncClient(address, timeout_s=TIMEOUT_S) as client:
            speculative = await _answer(client, Speculation(draft_count=DRAFT_COUNT))
            plain = await _answer(client, Speculation(enabled=False))
    except OutriderError as error:
        return Outcome(problem=error.message, code=error.exit_code)
    return Outcome(speculative, plain)


async def _answer(client: AsyncClient, speculation: Speculation) -> Answered:
    stream = client.generate(
        PROMPT, max_tokens=MAX_TOKENS, ignore_eos=True, seed=7, temperature=0.8, speculation=speculation
    )
    sample = (await stream.result()).samples[0]
    return Answered(tuple(sample.token_ids), sample.result)


def judge(tested: Outcome, *, has_draft: bool) -> Finding:
    """Whether both answers are the same, and speculation took part. `has_draft` tells whether it was to."""
    if tested.speculative is None or tested.plain is None:
        return _no_answer(tested)
    speculative, plain = tested.speculative, tested.plain
    if speculative.token_ids != plain.token_ids:
        return _different(speculative.token_ids, plain.token_ids)
    told = speculative.result.speculation
    sentence = (
        f"{len(plain.token_ids)} tokens are the same with and without speculation: {told.rounds} rounds with "
        f"{told.accepted_tokens} of {told.draft_tokens} guesses accepted, seed {plain.result.seed}, "
        f"{speculative.result.numerics_ids[-1]}."
    )
    if told.rounds < LEAST_ROUNDS:
        fix = "Report it with this page."
        return failed(CHECK, f"{told.rounds} rounds cannot give {MAX_TOKENS} tokens.", fix, SOFTWARE)
    if has_draft and not told.draft_tokens:
        fix = "Look into the draft's log; `outrider up` shows it."
        return warning(CHECK, f"{sentence} The draft guessed nothing, so nothing was gained.", fix)
    return ok(CHECK, sentence)


def _no_answer(tested: Outcome) -> Finding:
    problem = tested.problem if tested.problem.endswith(".") else f"{tested.problem}."
    if tested.code == UNAVAILABLE:
        return failed(CHECK, problem, "Start a stack with `outrider up`, or look into its log.", UNAVAILABLE)
    return failed(CHECK, problem, "Follow that sentence; the checks above may say more.", tested.code or SOFTWARE)


def _different(speculative: Sequence[int], plain: Sequence[int]) -> Finding:
    pairs = enumerate(zip(speculative, plain, strict=False))
    place = next((index for index, pair in pairs if pair[0] != pair[1]), min(len(speculative), len(plain)))
    sentence = f"Speculation changed the answer: token {place} differs, with the same seed under match."
    fix = "Run with --no-draft, and report it with this page: this must not happen."
    return failed(CHECK, sentence, fix, SOFTWARE)
