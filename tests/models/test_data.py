"""What is held out stays held out, and data depend on nothing but seed and step."""

import torch

from training.data import IGNORED, TrainingBlocks, held_out_blocks, targets_of

TOKENS = torch.arange(1000)  # a token's id is its place
HELD_OUT = held_out_blocks(1000, 16, 7)
BLOCKS = TrainingBlocks(TOKENS, targets_of(TOKENS, HELD_OUT, 16), 32, 3, "7 stage")


def test_the_held_out_text_of_the_embedded_pair_is_known() -> None:
    """The blocks that the first pair never learnt from, by their seed: others would count learnt text as unseen."""
    blocks = held_out_blocks(3_174_426, 256, 1)
    assert (len(blocks), len(set(blocks.tolist()))) == (248, 248)
    assert blocks[:4].tolist() == [2645, 1161, 10400, 6229]


def test_at_least_one_block_is_held_out() -> None:
    """Of a text of few blocks, too."""
    assert held_out_blocks(100, 32, 1).shape == (1,)


def test_a_target_is_the_next_token_unless_it_is_held_out() -> None:
    """Held-out tokens are read in their places, and never learnt."""
    hidden = {place for number in HELD_OUT.tolist() for place in range(number * 16, number * 16 + 16)}
    seen = set()
    for step in range(40):
        inputs, targets = BLOCKS.at(step)
        assert inputs.shape == targets.shape == (3, 32)
        wanted = [IGNORED if place + 1 in hidden else place + 1 for place in inputs.flatten().tolist()]
        assert targets.flatten().tolist() == wanted
        seen |= set(inputs.flatten().tolist())
    assert hidden <= seen


def test_a_pass_has_every_block_once() -> None:
    """And the next one has others, in another order."""
    starts = [int(start) for step in range(20) for start in BLOCKS.at(step)[0][:, 0]]
    first, second = starts[: BLOCKS.per_pass], starts[BLOCKS.per_pass : 2 * BLOCKS.per_pass]
    for own in (first, second):
        assert sorted(own) == list(range(min(own), min(own) + 32 * BLOCKS.per_pass, 32))
        assert own != sorted(own)
    assert sorted(first) != sorted(second)


def test_a_step_does_not_depend_on_the_steps_before() -> None:
    """So a resumed run sees what an unbroken one would have; another stage sees another order."""
    for step in (17, 0, 9):
        again = TrainingBlocks(BLOCKS.token_ids, BLOCKS.targets, 32, 3, "7 stage").at(step)
        assert all(torch.equal(*pair) for pair in zip(BLOCKS.at(step), again, strict=True))
        assert not torch.equal(TrainingBlocks(TOKENS, TOKENS, 32, 3, "7 other").at(step)[0], again[0])
