"""A real vLLM on CPU with guesses of a real draft service (make test-harness): its tokens, whatever the draft does."""

import signal
from collections.abc import Callable
from typing import Any

import pytest
from support.observability import families

from bench.vllm.lab import PROPOSER, Draft, Engine
from outrider.model_files.model_names import embedded_model
from outrider.process.metrics import scraped

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

TARGET, DRAFT = embedded_model("target"), embedded_model("draft")
NUM_TOKENS, NUM_ROWS = 160, 4
# More than four rows, so that some wait and come where others have ended; two are the same.
PROMPTS = [[0, 401, 913, 260, 555, 12], [0, 5, 6, 7], [0, 5, 6, 7], [0, 300], [0, 44, 1200, 9], [0, *range(100, 140)]]
Counters = dict[str, float]


def engine(draft: str = "", cpus: str = "0") -> Engine:
    """The embedded target, with guesses of the draft at an address, if one is given."""
    speculative = {**PROPOSER, "num_speculative_tokens": 4} if draft else None
    options = {"max_model_len": 512, "max_num_seqs": NUM_ROWS, "enforce_eager": True}
    return Engine(TARGET, speculative, draft=draft, deadline_ms=1000, cpus=cpus, **options)


@pytest.fixture(scope="module")
def expected() -> Any:
    """Answers without guesses."""
    with engine() as plain:
        plain.ask(PROMPTS, NUM_ROWS, NUM_TOKENS)
        return plain.finish()["answers"]


def test_text_is_that_without_guesses_whatever_happens_to_the_draft(expected: Any) -> None:
    """Killed, started again, frozen, let go on, and replaced by another model, each in mid-run. Every request is
    answered with the same tokens, and guesses are kept again after each.
    """
    draft = Draft(DRAFT)
    guessing = engine(draft.address)

    def until(is_so: Callable[[Counters], bool]) -> Counters:
        """The counters when something has come about; answers that end meanwhile are compared, and asked for again."""
        while True:
            said = guessing.read()
            if "answers" in said:
                assert said["answers"] == expected
                guessing.ask(PROMPTS, NUM_ROWS, NUM_TOKENS)
            if is_so(said["counters"]):
                return said["counters"]  # type: ignore[no-any-return]

    def grown(counters: Counters, name: str, amount: int) -> Counters:
        return until(lambda now: now[name] >= counters[name] + amount)

    with guessing:
        try:
            guessing.ask(PROMPTS, NUM_ROWS, NUM_TOKENS)
            now = until(lambda counters: counters["kept"] > 50)
            assert (now["rows_lost"], now["rows_refused"]) == (0, 0)
            draft.kill()
            now = grown(now, "rows_lost", 1)
            draft = Draft(DRAFT, draft.address)
            now = grown(now, "kept", 50)
            draft.process.send_signal(signal.SIGSTOP)
            now = grown(now, "rows_late", 1)
            draft.process.send_signal(signal.SIGCONT)
            now = grown(now, "kept", 50)
            draft.kill()
            draft = Draft(TARGET, draft.address)
            now = grown(now, "kept", 50)
            last = guessing.finish()
            assert last["answers"] == expected
            assert last["counters"]["errors"] == 0
        finally:
            draft.kill()


def test_two_engines_share_the_draft_s_forwards(expected: Any) -> None:
    """Each has one sequence at a time, so a forward of two sessions is one of both."""
    with Draft(DRAFT) as draft, engine(draft.address, "0") as one, engine(draft.address, "1") as other:
        for each in (one, other):
            each.ask(PROMPTS, 1, NUM_TOKENS)
        for each in (one, other):
            said = each.finish()
            assert said["answers"] == expected
            assert said["counters"]["kept"] > 50
        found = families(scraped(draft.metrics)[0].decode())["outrider_forward_sessions"].samples
    shared = {each.labels.get("le", each.name.rpartition("_")[2]): each.value for each in found}
    assert shared["count"] > shared["1.0"] > 0
    assert shared["2.0"] == shared["count"]
