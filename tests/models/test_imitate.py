"""What a head learns from, and what is said of it: the target's residuals, its distributions, and rounds."""

import math
from collections.abc import Iterator

import pytest
import torch
from support.rounding import allowed
from torch import Tensor, nn

from training.data import IGNORED
from training.imitate import STEP_WEIGHT, Teacher, continued, greedy_tokens_per_pass, imitation, measure_head
from training.model import PRESETS, new_model

MODEL = new_model(PRESETS["tiny"], "target", 3).eval().requires_grad_(False)
VOCAB_SIZE = PRESETS["tiny"].vocab_size
ALL_IDS = torch.arange(VOCAB_SIZE)
TOKENS = torch.randint(VOCAB_SIZE, (2, 12), generator=torch.Generator().manual_seed(4))


class FixedHead(nn.Module):
    """A head that guesses what it was given, whatever it is shown."""

    def __init__(self, *steps: Tensor) -> None:
        super().__init__()
        self.steps = nn.ParameterList(steps)

    def guesses(self, features: Tensor, token_ids: Tensor) -> Iterator[Tensor]:
        yield from self.steps


def random_steps(num_ids: int, *, seed: int = 5) -> list[Tensor]:
    """Logits of two steps ahead over so many ids."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 11 - step, num_ids, generator=generator) for step in range(2)]


def laws() -> Tensor:
    """The model's distributions [2, 12, V], where autocast is on as while a head learns."""
    with torch.autocast("cpu", torch.bfloat16):
        return MODEL(TOKENS).logits.float().softmax(-1)


def test_taps_are_what_enters_a_layer_and_what_leaves_the_last_norm() -> None:
    """Boundary b is layer b's input, the number of layers names the final norm's output; side by side as they stand."""
    seen: dict[int, Tensor] = {}
    hooks = [
        layer.register_forward_pre_hook(lambda _, inputs, number=number: seen.update({number: inputs[0]}))
        for number, layer in enumerate(MODEL.model.layers)
    ]
    hooks.append(MODEL.model.norm.register_forward_hook(lambda _module, _inputs, output: seen.update({2: output})))
    reading = Teacher(MODEL, (2, 0, 1), ALL_IDS).read(TOKENS)
    for hook in hooks:
        hook.remove()
    assert not torch.equal(seen[0], seen[1])
    assert torch.equal(reading.features, torch.cat([seen[2], seen[0], seen[1]], -1))
    expected = seen[2] @ MODEL.get_output_embeddings().weight.T
    limit = 2 * allowed(expected, seen[2].shape[-1])
    torch.testing.assert_close(reading.logits, expected, atol=limit, rtol=0)


def test_the_loss_is_that_of_the_law_some_tokens_ahead() -> None:
    """Row m of step s learns the distribution at row m + 1 + s, where the text after that row may be learnt."""
    targets = TOKENS.clone()
    targets[0, 5:7] = IGNORED
    steps, wanted = random_steps(VOCAB_SIZE), laws()
    expected = 0.0
    for step, logits in enumerate(steps):
        for text in range(2):
            for row in range(11 - step):
                at = row + 1 + step
                if text == 1 or at not in (5, 6):
                    expected -= STEP_WEIGHT**step * float(wanted[text, at] @ logits[text, row].log_softmax(-1))
    found = imitation(Teacher(MODEL, (1,), ALL_IDS))(FixedHead(*steps), TOKENS, targets)
    assert found.item() == pytest.approx(expected / (1 + STEP_WEIGHT), rel=1e-4)


def test_a_draft_vocabulary_has_its_own_law() -> None:
    """The target's restricted to its ids, and only where the target's likeliest is one of them."""
    best = laws().argmax(-1)
    # Half of the likeliest ids, and some others.
    ids = torch.cat([best.flatten().unique()[::2], ALL_IDS[:40]]).unique()
    steps, overlaps = random_steps(len(ids)), []
    for step, logits in enumerate(steps):
        for text in range(2):
            for row in range(11 - step):
                at = (text, row + 1 + step)
                if best[at] in ids:
                    law = laws()[at][ids]
                    kept = torch.minimum(law / law.sum(), logits[text, row].softmax(-1)).sum()
                    overlaps.append(STEP_WEIGHT**step * -math.log(float(kept)))
    assert 0 < len(overlaps) < 2 * (11 + 10)
    loss = imitation(Teacher(MODEL, (1,), ids), overlap=True)
    found = loss(FixedHead(*steps), TOKENS, TOKENS)
    assert found.item() == pytest.approx(sum(overlaps) / (1 + STEP_WEIGHT), rel=1e-4)


def test_what_is_kept_counts_all_ids_of_the_target() -> None:
    """A head that knows few ids is kept for no more than they are likely, and agrees only about them."""
    ids = ALL_IDS[:40]
    steps = random_steps(len(ids))
    found = measure_head(FixedHead(*steps), Teacher(MODEL, (1,), ids), TOKENS, first_row=3)
    assert len(found) == 2
    for step, (overlap, agreement) in enumerate(found):
        law, guess = laws()[:, 4 + step :], steps[step].softmax(-1)[:, 3:]
        assert overlap == pytest.approx(float(torch.minimum(law[..., ids], guess).sum(-1).mean()), rel=1e-4)
        assert agreement == pytest.approx(float((law.argmax(-1) == guess.argmax(-1)).double().mean()))


def test_rounds_follow_each_other() -> None:
    """Tokens a pass are those of the rounds that decoding would make, not of those that might begin anywhere."""
    text = torch.arange(1, 13)[None]
    steps = [torch.zeros(1, 11 - step, VOCAB_SIZE) for step in range(2)]
    # After n tokens the first guess is for token n. Right: from 3 on one of two, from 5 on both, from 8 on none.
    for behind, right in ((3, 1), (5, 2), (8, 0), (4, 2), (6, 2), (7, 1)):
        for step in range(right):
            steps[step][0, behind - 2, text[0, behind + step]] = 1
    found = greedy_tokens_per_pass(FixedHead(*steps), Teacher(MODEL, (1,), ALL_IDS), text, first_row=1)
    # Rounds after 3, 5, 8, 9 and 10 tokens; the one after 11 would end past the text.
    assert found == pytest.approx((2 + 3 + 1 + 1 + 1) / 5)


def test_a_text_is_continued_as_the_model_has_it() -> None:
    """Greedy tokens are the likeliest after all before them; drawn ones repeat with the generator."""
    texts = continued(MODEL, TOKENS[:, :4], 10, None)
    assert torch.equal(texts[:, :4], TOKENS[:, :4])
    assert torch.equal(MODEL(texts).logits[:, 3:-1].argmax(-1), texts[:, 4:])
    drawn = [continued(MODEL, TOKENS[:, :4], 10, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
