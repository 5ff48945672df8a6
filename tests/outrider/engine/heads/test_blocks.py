"""Block drafters against numpy: logits of every row of a block, with every switch of every layout."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.heads import tiny_heads
from support.heads.block_oracle import BlockOracle
from support.heads.head_oracle import Target
from support.heads.head_rows import head_cache
from support.heads.tiny_heads import NUM_LAYERS, VOCAB, Writer, change, dflash, dflash_speculators, tiny_target
from support.models.engine_cases import every_ops
from support.models.model_cases import random_ids
from support.rounding import reach
from torch import Tensor

from outrider.engine.batching import RowPlan
from outrider.engine.heads.block_head import BlockHead
from outrider.engine.heads.checkpoint import read_head
from outrider.engine.heads.decoder import HeadDecoder
from outrider.engine.ops import Ops
from outrider.engine.ops.eager import EagerOps
from outrider.errors import ModelRefused

CPU = torch.device("cpu")
LENGTH = 23
# Each hides something from the rows of a block after so many tokens.
WINDOWS = {
    "use_sliding_window": True,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}


def wrote(**keys: object) -> Writer:
    return lambda folder: dflash(folder, **keys)  # type: ignore[arg-type]


def inside(**keys: object) -> Writer:
    """Keys of the drafter in an object of its own."""
    return wrote(dflash_config=keys)


def spoken(**keys: object) -> Writer:
    return lambda folder: dflash_speculators(folder, **keys)


def matrices(folder: Path) -> Path:
    """Matrices of its own, for the whole vocabulary."""
    shapes = {f"{name}.weight": (VOCAB, tiny_heads.HIDDEN) for name in ("embed_tokens", "lm_head")}
    return change(dflash(folder), tensors=dict(tiny_heads.random_tensors(shapes, 15)))


CASES: dict[str, Writer] = {
    "authors": wrote(),
    "block-inside": lambda folder: change(inside(block_size=6)(folder), config={"block_size": None}),
    "one-tap": wrote(ids=(4,)),
    "other-taps": wrote(ids=(1, 3)),
    "one-layer": wrote(layers=1),
    "other-mask": wrote(mask=8),
    "larger-block": wrote(block_size=6),
    "theta": wrote(rope_theta=300.0),
    "linear": wrote(rope_scaling={"rope_type": "linear", "factor": 4.0}),
    "rope-parameters": wrote(rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 500.0}),
    "biases": wrote(biased=True, attention_bias=True),
    "windows": wrote(**WINDOWS),
    "wider-windows": wrote(**WINDOWS | {"sliding_window": 9}),
    "windows-that-see-all": wrote(**WINDOWS, is_causal=False),
    "windows-non-causal": wrote(**WINDOWS, sliding_window_non_causal=True),
    "causal": wrote(is_causal=True),
    "causal-inside": inside(causal=True),
    "causal-windows": wrote(**WINDOWS, is_causal=True),
    "anchor": wrote(sample_from_anchor=True),
    "own-matrices": matrices,
    "scaled": wrote(output_multiplier=0.5),
    "capped": wrote(final_logit_softcapping=3.0),
    "capped-inside": inside(final_logit_softcapping=2.0, output_multiplier=0.25),
    "scaled-embeddings": inside(input_embedding_scale=6.5),
    "speculators": spoken(),
    "speculators-windows": spoken(
        layer={"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]}
    ),
    "speculators-windows-non-causal": spoken(
        layer={"use_sliding_window": True, "sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]},
        sliding_window_non_causal=True,
    ),
    "speculators-taps": spoken(aux_hidden_state_layer_ids=[0, 5]),
}
EACH = pytest.mark.parametrize("write", CASES.values(), ids=CASES.keys())
TOKENS = random_ids(LENGTH, VOCAB)


def boundaries(length: int = LENGTH) -> Tensor:
    """What a target knew at each token, each boundary at a scale of its own."""
    generator = torch.Generator().manual_seed(31)
    scales = torch.linspace(0.5, 2, NUM_LAYERS + 1)[:, None, None]
    return torch.randn(NUM_LAYERS + 1, length, tiny_heads.HIDDEN, generator=generator) * scales


def loaded(folder: Path, ops: Ops | None = None) -> BlockHead:
    target = tiny_target()
    head, _ = read_head(folder, target).load(target, CPU, torch.float32, ops or EagerOps())
    assert isinstance(head, BlockHead)
    return head


def computed(head: BlockHead, ops: Ops | None = None, tokens: list[int] = TOKENS, pieces: int = 7) -> Tensor:
    """Logits of a block after the tokens, of which the cache gets so many at a time, in slots in no order."""
    masks, count = head.facts.masks, len(tokens) - 1
    assert masks is not None
    block = [tokens[-1], *[masks.token_id] * masks.count(1)]
    slots = torch.randperm(count + 20, generator=torch.Generator().manual_seed(1))[: count + len(block)]
    cache = head_cache(head, count + 20)
    cache.keep_features(1)
    features = torch.cat([boundaries(len(tokens))[tap, :count] for tap in head.facts.taps], 1)
    for first in range(0, count, pieces):
        last = min(first + pieces, count)
        head.keep(features[first:last].contiguous(), first, slots[first:last].numpy(), cache)
    positions = torch.arange(count, count + len(block))
    plan = RowPlan(
        token_ids=torch.tensor(block),
        positions=positions,
        slots=slots[count:].contiguous(),
        key_slots=slots.int(),
        key_starts=torch.zeros(len(block), dtype=torch.int64),
        key_counts=(positions + 1).int(),
        max_key_count=len(slots),
    )
    decoder = HeadDecoder(head, tiny_target(), ops or EagerOps())
    return decoder.forward(plan, cache, torch.arange(len(block)))


def expected(folder: Path, tokens: list[int] = TOKENS) -> tuple[Tensor, float]:
    """Logits of the oracle, and how far rounding may carry ours."""
    parts = tiny_target()
    arrays = [each.double().numpy() for each in (parts.embedding, parts.output, boundaries(len(tokens)))]
    oracle = BlockOracle(folder, Target(*arrays))

    def compute() -> Tensor:
        return torch.from_numpy(oracle.logits(tokens))

    return compute(), reach([*oracle.tensors.values(), *arrays[:2]], compute)


def difference(ours: Tensor, theirs: tuple[Tensor, float]) -> float:
    """The largest difference of a logit, in parts of what rounding may do; the same ids must be impossible."""
    assert torch.equal(ours.isinf(), theirs[0].isinf())
    return float((ours - theirs[0])[~ours.isinf()].abs().max() / theirs[1])


@EACH
def test_logits_of_a_block_are_those_of_the_oracle(tmp_path: Path, write: Writer) -> None:
    """Of every row, with every set of operations that runs here."""
    folder = write(tmp_path / "head")
    theirs = expected(folder)
    for ops in every_ops():
        assert difference(computed(loaded(folder, ops), ops), theirs) < 1, ops.name


# Two checkpoints that differ in one thing only, which a loader may lose.
PLANTED: dict[str, tuple[Writer, Writer]] = {
    "theta": (wrote(), CASES["theta"]),
    "scaling": (wrote(), CASES["linear"]),
    "mask": (wrote(), CASES["other-mask"]),
    "block": (wrote(block_size=6), wrote(block_size=7)),
    "order of taps": (wrote(), CASES["other-taps"]),
    "outputs of layers": (wrote(), wrote(ids=(2, 0))),
    "windows": (wrote(), CASES["windows"]),
    "width of windows": (CASES["windows"], CASES["wider-windows"]),
    "windows are causal": (CASES["windows"], CASES["windows-that-see-all"]),
    "windows are causal, by another key": (CASES["windows"], CASES["windows-non-causal"]),
    "windows alone are causal": (CASES["windows"], CASES["causal-windows"]),
    "causal": (wrote(), CASES["causal"]),
    "causal inside": (wrote(), CASES["causal-inside"]),
    "output_multiplier": (wrote(), CASES["scaled"]),
    "final_logit_softcapping": (wrote(), CASES["capped"]),
    "input_embedding_scale": (wrote(), CASES["scaled-embeddings"]),
    "own matrices": (wrote(), matrices),
}


@pytest.mark.parametrize(("one", "other"), PLANTED.values(), ids=PLANTED.keys())
def test_what_a_loader_may_lose_changes_logits(tmp_path: Path, one: Writer, other: Writer) -> None:
    """Both are the oracle's, and neither is near the other's."""
    folders = one(tmp_path / "one"), other(tmp_path / "other")
    ours = [computed(loaded(folder))[:5] for folder in folders]
    for place, folder in enumerate(folders):
        logits, reached = expected(folder)
        assert difference(ours[place], (logits[:5], reached)) < 1
        assert difference(ours[1 - place], (logits[:5], reached)) > 100


@pytest.mark.parametrize("write", [wrote(), CASES["windows"], CASES["causal"]])
def test_every_row_stands_on_the_last_token_and_on_the_first(tmp_path: Path, write: Writer) -> None:
    """No row of the text is lost at its beginning, and the block begins with a token and not with a mask."""
    head, other = loaded(write(tmp_path / "head")), [*TOKENS[:-1], TOKENS[-1] ^ 1]
    assert not (computed(head) == computed(head, tokens=other)).all(1).any()
    first = boundaries()[:, 0].clone()
    known = computed(head)
    head.states_of = without_the_first(head, first)  # type: ignore[method-assign]
    assert not (computed(head) == known).all(1).any()


def without_the_first(head: BlockHead, first: Tensor) -> Callable[[Tensor], Tensor]:
    """Another state of the text's first token."""
    real, wanted = head.states_of, torch.cat([first[tap] for tap in head.facts.taps])

    def states_of(features: Tensor) -> Tensor:
        return real(torch.where((features == wanted).all(1, keepdim=True), -features, features))

    return states_of


@pytest.mark.parametrize("write", [wrote(), CASES["windows"], CASES["speculators"]])
def test_bits_are_those_of_any_pieces(tmp_path: Path, write: Writer) -> None:
    """In which a text was read, where operations promise that for a row."""
    for ops in (each for each in every_ops() if type(each) is not EagerOps):
        head = loaded(write(tmp_path / f"head-{id(ops)}"), ops)
        once = computed(head, ops, pieces=LENGTH)
        assert all(torch.equal(computed(head, ops, pieces=pieces), once) for pieces in (1, 5))


@pytest.mark.parametrize("write", [wrote(), CASES["capped-inside"], CASES["speculators"]])
def test_a_row_s_logits_are_its_own(tmp_path: Path, write: Writer) -> None:
    """Bit for bit, whatever other rows there are."""
    outputs = torch.randn(37, tiny_heads.HIDDEN, generator=torch.Generator().manual_seed(2)) * 3
    for ops in (each for each in every_ops() if type(each) is not EagerOps):
        head = loaded(write(tmp_path / f"head-{id(ops)}"), ops)
        rows = [head.logits(outputs[row : row + 1].contiguous(), ()) for row in range(len(outputs))]
        assert torch.equal(head.logits(outputs, ()), torch.cat(rows))


@EACH
def test_matrices_take_the_wanted_type(tmp_path: Path, write: Writer) -> None:
    """And norms and biases stay float32."""
    target = tiny_target()
    head, _ = read_head(write(tmp_path / "head"), target).load(target, CPU, torch.bfloat16, EagerOps())
    kinds = {(weight.dtype, weight.ndim) for weight in head.weights}
    assert kinds == {(torch.bfloat16, 2), (torch.float32, 1)}


def test_notes_say_every_switch(tmp_path: Path) -> None:
    """What was found, and what has its default."""
    notes = read_head(CASES["windows"](tmp_path / "head"), tiny_target()).notes
    assert notes == (
        "target_layer_ids: [3, 1], outputs of layers",
        "block_size: 5",
        "mask_token_id: 7",
        "sample_from_anchor: false (default)",
        "sliding_window_non_causal: false (default)",
        "causal layers: 0, 2",
        "rope_theta: 1e+06",
        "rope_scaling: Rope",
        "context: 256 positions",
        "embed_tokens: of the target",
        "lm_head: of the target",
        "vocabulary: 90 of 90 ids",
    )
    small = read_head(spoken(block_size=None)(tmp_path / "small"), tiny_target()).notes
    assert "block_size: 8 (default)" in small
    assert "vocabulary: 33 of 90 ids" in small


REFUSED: dict[str, tuple[Writer, str]] = {
    "mask": (wrote(mask=90), '"dflash_config.mask_token_id" is 90, but must be an integer from 0 to 89'),
    "no-mask": (inside(mask_token_id=None), '"dflash_config.mask_token_id" is missing'),
    "one-row": (wrote(block_size=1), '"block_size" is 1, but must be an integer from 2 to 64'),
    "no-taps": (
        inside(target_layer_ids=None),
        '"dflash_config.target_layer_ids" is None, but must be a list of layers',
    ),
    "last-layer": (
        wrote(ids=(1, 5)),
        '"dflash_config.target_layer_ids" is [1, 5], but nobody can tell what was read behind layer 6, the last: '
        "before or after the final norm",
    ),
    "other-target": (wrote(num_target_layers=36), '"num_target_layers" is 36, but the target has 6 layers'),
    "vocabulary": (wrote(vocab=91), '"vocab_size" is 91, but the target has 90'),
    "layers": (wrote(model_type="llama"), "\"model_type\" is 'llama', but only layers of qwen3 are served in such a"),
    "window": (wrote(**WINDOWS | {"sliding_window": 4}), '"sliding_window" is 4, but must hold a block of 5'),
    "no-window": (
        wrote(layer_types=["sliding_attention"] * 3),
        '"layer_types" names sliding_attention, but no window is switched on',
    ),
    "gelu": (wrote(hidden_act="gelu"), '"hidden_act" is \'gelu\', but must be "silu"'),
    "domino": (wrote(projector_type="domino"), "\"projector_type\" is 'domino', but must be 'dflash', or left out"),
    "shifted": (wrote(shift_label=True), '"shift_label" is True, but must be False, or left out'),
    "jetspec": (inside(causal_head=True), '"dflash_config.causal_head" is True, but must be False, or left out'),
    "mimo": (inside(use_swa=True), '"dflash_config.use_swa" is True, but must be False, or left out'),
    "sinks": (inside(attention_sink_bias=True), '"dflash_config.attention_sink_bias" is True, but must be False'),
    "values": (inside(attention_value_scale=0.7), '"dflash_config.attention_value_scale" is 0.7, but must be 1'),
    "neighbours": (wrote(is_neox_style=False), '"is_neox_style" is False, but must be True, or left out'),
    "no-features": (wrote(use_aux_hidden_state=False), '"use_aux_hidden_state" is False, but must be True'),
    "deepspec": (
        lambda folder: change(
            wrote(architectures=["Qwen3DFlashModel"], target_layer_ids=[3, 1], mask_token_id=7)(folder),
            config={"dflash_config": None},
        ),
        '"sample_from_anchor" is missing, and without dflash_config it may have been meant',
    ),
    "no-object": (lambda folder: change(dflash(folder), config={"dflash_config": 7}), '"dflash_config" is 7, but must'),
    "switch": (wrote(is_causal="no"), "\"is_causal\" is 'no', but must be true or false"),
    "quantized": (wrote(quantization_config={"bits": 4}), '"quantization_config" is set, but only unquantized'),
    "biases": (wrote(biased=True), "layers.0.self_attn.k_proj.bias is no tensor of this layout"),
    "no-biases": (wrote(attention_bias=True), "lacks the tensor layers.0.self_attn.k_proj.bias"),
    "fewer-layers": (wrote(num_hidden_layers=2), "layers.2.input_layernorm.weight is no tensor of this layout"),
    "more-taps": (
        inside(target_layer_ids=[1, 2, 3]),
        "fc.weight has the shape [48, 96], but config.json and the target ask for [48, 144]",
    ),
    "gates": (
        lambda folder: change(dflash(folder), tensors={"layers.0.self_attn.g_proj.weight": torch.ones(2, 2)}),
        "layers.0.self_attn.g_proj.weight is no tensor of this layout",
    ),
    "no-norm": (
        lambda folder: change(dflash(folder), tensors={"hidden_norm.weight": None}),
        "lacks the tensor hidden_norm.weight",
    ),
    "no-head-for-it": (
        lambda folder: change(dflash_speculators(folder), tensors={"lm_head.weight": None}),
        "lacks the tensor lm_head.weight",
    ),
    "map": (
        lambda folder: change(dflash_speculators(folder), tensors={"d2t": torch.zeros(5, dtype=torch.int64)}),
        "d2t has the shape [5], but must have [33]",
    ),
}


@pytest.mark.parametrize(("write", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_not_served_is_refused_by_its_name(tmp_path: Path, write: Writer, words: str) -> None:
    """The key or the tensor, the value and the limit, before any weight is read."""
    with pytest.raises(ModelRefused) as caught:
        read_head(write(tmp_path / "head"), tiny_target())
    assert words in caught.value.message


def test_theta_can_be_overridden(tmp_path: Path) -> None:
    """The argument wins over the file."""
    folder, stated = dflash(tmp_path / "head"), dflash(tmp_path / "stated", rope_theta=77.0)
    assert "rope_theta: 77" in read_head(folder, tiny_target(), 77.0).notes
    assert "rope_theta: 77" in read_head(stated, tiny_target()).notes
