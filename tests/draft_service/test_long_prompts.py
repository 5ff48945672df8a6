"""A long prompt beside sessions that guess: every step has a guess of each, and no guess changes."""

from pathlib import Path

import pytest
from support.basics import Answers, spec_of
from support.models.tiny_models import write_tiny_model
from support.services.stepped_draft import SPEC, Draft, continued, fresh_guesses

from draft_service.states import Wanted
from outrider.drafters.model_drafter import ModelDrafter
from outrider.engine.runner import ModelRunner
from outrider.rpc.fencing import Fence

LONG = spec_of(range(1, 121), 400, seed=4, eos=(), temperature=1.0)


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    """A draft whose context holds a long prompt."""
    folder: Path = write_tiny_model(tmp_path_factory.mktemp("roomy") / "model", "llama", vocab_size=257)
    return ModelRunner.load(str(folder), dtype="float32", kv_tokens=2048)


def test_a_long_prompt_holds_up_no_guesses(roomy: ModelRunner) -> None:
    """Rows cost a millisecond: while the prompt is read in parts, each step of the other session has its guess."""
    draft = Draft(roomy)
    counts = roomy.forward_counts
    seconds = [0.0, counts.num_rows]

    def clock() -> float:
        seconds[:] = [seconds[0] + counts.num_rows - seconds[1], counts.num_rows]
        return seconds[0]

    draft.drafter = ModelDrafter(roomy, draft.table.with_room, clock=clock)
    draft.open(SPEC, 4)
    guesses = draft.guesses()
    long_answers = Answers()
    draft.sessions.open(Fence(bytes(16), 1, 120), LONG, Wanted(3, 0), long_answers)
    spec, num_steps = SPEC, 0
    while not long_answers:
        spec = continued(spec, guesses[:1])
        draft.advance(1, len(spec.token_ids), guesses[:1], 3)
        for _ in range(3):
            assert draft.step()
            num_steps += 1
        [answer] = draft.answers
        draft.answers.clear()
        assert answer.content is not None
        assert answer.content.token_ids == fresh_guesses(roomy, spec, 3)
        guesses = answer.content.token_ids
    assert num_steps > 9
    assert long_answers[0].content.token_ids == fresh_guesses(roomy, LONG, 3)
    draft.table.clear()
