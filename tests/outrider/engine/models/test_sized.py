"""A wide model says what the small model inside it says, token for token, and its random weights have no say."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.models.tiny_models import TARGET, write_tiny_model
from support.rounding import reach
from tokenizers import Tokenizer
from torch import Tensor

from outrider.engine.batching import Feed
from outrider.engine.models.checkpoints import SizedCheckpoint, find_checkpoint
from outrider.engine.models.config import ModelConfig
from outrider.engine.models.rope import LinearRope
from outrider.engine.models.sized import STANDARD_DEVIATION, spots, widened
from outrider.engine.ops.blocks import unpacked
from outrider.engine.ops.eager import EagerOps
from outrider.engine.runner import ModelRunner
from outrider.engine.sampling.draw import DrawInput, forward_and_draw
from outrider.errors import ModelRefused
from outrider.model_files.model_names import PRESETS, Shape
from outrider.parameters import SamplingParameters, SessionSpec

CPU = torch.device("cpu")
DRAFT = TARGET.parent / "draft"
# Around the draft's 128, 352, 2, 2, 1, 64: another head dimension, another group size, a further layer, odd sizes.
WIDE = Shape(204, 360, 3, 6, 2, 128, tied_embeddings=False)
PROMPTS = ("Once upon a time there was a miller who had", "The fox said to the wolf,", "Two children were lost")


def made(shape: Shape = WIDE, seed: int = 0, inside: Path = DRAFT) -> ModelRunner:
    """A wide model of any shape, in float32."""
    return loaded(SizedCheckpoint.of("wide", inside, shape, seed))


def loaded(model: str | SizedCheckpoint) -> ModelRunner:
    """A model in float32."""
    return ModelRunner.load(model, dtype="float32", num_threads=2, kv_tokens=8192)


def said(runner: ModelRunner, num_tokens: int = 64) -> list[tuple[int, ...]]:
    """What a model says to every prompt, greedily and at temperature 0.8, all at a time."""
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    inputs = []
    for seed, prompt in enumerate(PROMPTS):
        token_ids = tuple(tokenizer.encode(prompt).ids)
        for temperature in (0.0, 0.8):
            sampling = SamplingParameters(temperature=temperature, ignore_eos=True)
            ends = runner.config.eos_token_ids
            spec = SessionSpec(token_ids, len(token_ids), sampling, seed, 4096, ends, frozenset())
            inputs.append(DrawInput(Feed(runner.open(token_ids, len(token_ids))), spec))
    for _ in range(num_tokens):
        for draw_input, outcome in zip(inputs, forward_and_draw(runner, inputs), strict=True):
            assert isinstance(outcome, list)
            draw_input.feed.session.extend(outcome)
    texts = [tuple(draw_input.feed.session.token_ids[draw_input.spec.prompt_len :]) for draw_input in inputs]
    for draw_input in inputs:
        draw_input.feed.session.free()
    return texts


def last_logits(runner: ModelRunner, token_ids: Sequence[int]) -> Tensor:
    """Logits [V] after a text."""
    session = runner.open(token_ids, len(token_ids))
    rows = None
    while rows is None:
        result = runner.forward([Feed(session)])
        rows = result.ranges[0]
    session.free()
    return result.logits[rows.start]


def assert_near(runner: ModelRunner, small: ModelRunner, prompt: Sequence[int]) -> None:
    """Logits after a text are those of a small model in float32, up to rounding, of its last part where it is long."""
    limit = reach(small.model.weights, lambda: last_logits(small, prompt[-600:]))
    torch.testing.assert_close(last_logits(runner, prompt), last_logits(small, prompt), atol=limit, rtol=0)


def random_ids(count: int) -> list[int]:
    """Token ids from a fixed seed."""
    return torch.randint(4096, (count,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(scope="module")
def wide() -> ModelRunner:
    """The embedded draft in twice the head dimension."""
    return made()


@pytest.mark.slow
@pytest.mark.parametrize(("model", "inside"), [("sized:200m", TARGET), ("sized:10m", DRAFT)])
def test_presets_say_what_the_model_inside_says(model: str, inside: Path) -> None:
    """64 tokens in float32 are the same, greedy and drawn, and logits agree up to rounding."""
    large, small = loaded(model), loaded(str(inside))
    assert said(large) == said(small)
    assert_near(large, small, random_ids(50))


@pytest.mark.slow
def test_another_head_dimension_says_the_same(wide: ModelRunner) -> None:
    """With heads twice as wide, in other groups, and an output matrix of its own."""
    small = loaded(str(DRAFT))
    assert said(wide) == said(small)
    assert_near(wide, small, random_ids(600))


def test_other_heads_and_groups_say_the_same(tmp_path: Path) -> None:
    """A model of two groups of two, whose heads are four times as wide in three groups of three."""
    inside = write_tiny_model(tmp_path / "small", "llama", tie_word_embeddings=True, context_len=4096)
    runner = made(Shape(64, 96, 3, 9, 3, 64), inside=inside)
    assert_near(runner, loaded(str(inside)), [token_id % 300 for token_id in random_ids(200)])


def test_random_weights_have_no_effect(wide: ModelRunner) -> None:
    """Another seed changes most weights and not one bit of the logits."""
    other = made(seed=1)
    assert not torch.equal(wide.model.head, other.model.head)
    prompt = random_ids(80)
    assert torch.equal(last_logits(wide, prompt), last_logits(other, prompt))


@pytest.mark.slow
def test_the_whole_context_is_served(wide: ModelRunner, tmp_path: Path) -> None:
    """At position 4,095 a wide model agrees with the small one, once that is allowed as long a context."""
    patient = Path(shutil.copytree(DRAFT, tmp_path / "patient"))
    keys = json.loads((patient / "config.json").read_text())
    (patient / "config.json").write_text(json.dumps(keys | {"max_position_embeddings": 4096}))
    assert wide.context_len == 4096
    assert_near(wide, loaded(str(patient)), random_ids(4096))


def tensors_of(shape: Shape = WIDE, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The tensors of a wide model, made in memory."""
    made, _ = SizedCheckpoint.of("wide", DRAFT, shape, seed).load(CPU, dtype, EagerOps())
    return {name: unpacked(tensor) for name, tensor in made.items()}


def test_what_writes_is_zero_and_the_rest_is_random() -> None:
    """Beyond the small model nothing reaches the residual stream, and all other matrices are full of numbers."""
    tensors = tensors_of()
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            assert not tensor[128:].any(), name
        elif tensor.ndim == 2 and "embed" not in name:
            # The first 128 keys belong to a head that is used, and half of them are zero.
            outside = tensor[128:, -1]
            assert outside.all(), name
            assert 0.5 < float(outside.std()) / STANDARD_DEVIATION < 1.5, name
    assert not tensors["model.embed_tokens.weight"][:, 128:].any()
    assert not tensors["model.layers.2.mlp.down_proj.weight"].any()


def test_numbers_depend_on_the_seed_and_the_name_alone() -> None:
    """Made again they are the same; of two matrices of one shape and of two seeds they differ."""
    first, again, other = tensors_of(), tensors_of(), tensors_of(seed=1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    name = "model.layers.2.mlp.gate_proj.weight"
    assert not torch.equal(first[name], other[name])
    assert not torch.equal(first[name], first[name.replace("gate", "up")])
    assert torch.equal(first[name].bfloat16(), tensors_of(dtype=torch.bfloat16)[name])


def test_the_digest_names_what_a_model_is_made_from(tmp_path: Path) -> None:
    """Model inside, shape and seed; another one for each of them."""
    inside = write_tiny_model(tmp_path / "small", "llama", vocab_size=4096, tie_word_embeddings=True)
    checkpoints = [
        SizedCheckpoint.of("a", DRAFT, WIDE, 0),
        SizedCheckpoint.of("a", DRAFT, WIDE, 1),
        SizedCheckpoint.of("a", DRAFT, replace(WIDE, num_layers=4), 0),
        SizedCheckpoint.of("a", inside, WIDE, 0),
    ]
    digests = [each.digest() for each in checkpoints]
    assert len(set(digests)) == 4
    assert SizedCheckpoint.of("b", DRAFT, WIDE, 0).digest() == digests[0]
    assert all(len(digest) == 32 for digest in digests)


def test_pairs_go_to_those_of_their_frequency() -> None:
    """Head dimension 4 in 8: pairs (0, 2) and (1, 3) become (0, 4) and (2, 6), of which the frequencies are equal."""
    config = ModelConfig.read(DRAFT)
    small = replace(config, head_dim=4, num_heads=4, num_kv_heads=2)
    wide = replace(small, head_dim=8, num_heads=9, num_kv_heads=3)
    places = spots(small, wide)
    heads = [place.item() // 8 for place in places["q_proj"].rows[::4]]
    assert heads == [0, 1, 3, 4]
    assert [place.item() for place in places["k_proj"].rows] == [0, 2, 4, 6, 8, 10, 12, 14]
    for pair in range(2):
        assert config.ropes[0].theta ** (-2 * pair / 4) == config.ropes[0].theta ** (-2 * (2 * pair) / 8)


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        (replace(WIDE, hidden_size=96), "hidden size is 128, above 96"),
        (replace(WIDE, num_layers=1), "number of layers is 2, above 1"),
        (replace(WIDE, head_dim=96), "head dimension 64 does not divide 96"),
        (replace(WIDE, num_heads=2), "number of heads in a group is 2, above 1"),
    ],
)
def test_a_shape_that_is_too_small_is_refused(shape: Shape, reason: str) -> None:
    """Before anything is made."""
    with pytest.raises(ModelRefused, match=reason):
        SizedCheckpoint.of("wide", DRAFT, shape, 0)


def test_what_cannot_be_undone_is_refused(tmp_path: Path) -> None:
    """Norms of heads and some scalings see the wider head, windows the layers; a tied shape has one matrix."""
    with pytest.raises(ModelRefused, match="norms of heads"):
        widened(ModelConfig.read(write_tiny_model(tmp_path / "qwen3", "qwen3")), WIDE)
    for changes in ({"ropes": (LinearRope(theta=10000.0, factor=2.0),)}, {"windows": (None, 64)}):
        with pytest.raises(ModelRefused, match="scaled rotary embedding or sliding windows"):
            widened(replace(ModelConfig.read(DRAFT), **changes), WIDE)
    untied = replace(ModelConfig.read(DRAFT), tied_embeddings=False)
    with pytest.raises(ModelRefused, match="output matrix of its own"):
        widened(untied, PRESETS["draft"]["10m"])


def test_a_sized_model_is_found_by_name() -> None:
    """Without loading anything: its shape, its tokenizer's folder, and the explicit name."""
    checkpoint = find_checkpoint("sized:200m@5")
    assert (checkpoint.name, checkpoint.folder) == ("sized:target-200m@5", TARGET)
    assert checkpoint.config.hidden_size == 1024
    with pytest.raises(ModelRefused, match="is no sized model"):
        ModelRunner.load("sized:7b")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: what is made on one needs one")
def test_a_model_made_on_a_device_says_the_same() -> None:
    """Its random numbers are others than the CPU's, and its logits agree with the small model's all the same."""
    device_runner = ModelRunner.load("sized:200m", device="cuda:0", dtype="float32", kv_tokens=8192)
    prompt = random_ids(50)
    logits = last_logits(device_runner, prompt)
    assert logits.device.type == "cuda"
    torch.testing.assert_close(logits.cpu(), last_logits(loaded(str(TARGET)), prompt), atol=1e-2, rtol=0)
