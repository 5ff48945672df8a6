"""Every layout and switch of feature heads against numpy: logits of true rows, then of drafted ones."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from support.heads import tiny_heads
from support.heads.head_oracle import HeadOracle, Target
from support.heads.head_rows import run_head
from support.heads.tiny_heads import (
    CONTEXT_LEN,
    HIDDEN,
    LLAMA3_SCALING,
    NUM_LAYERS,
    VOCAB,
    Writer,
    change,
    eagle1,
    eagle1_speculators,
    eagle3,
    eagle3_speculators,
    eagle3_whole,
    mimo,
    modelopt,
    mtp_speculators,
    specforge,
    tiny_target,
)
from support.models.engine_cases import every_ops
from support.models.model_cases import all_logits, random_ids
from support.rounding import reach
from torch import Tensor

from outrider.engine.heads.checkpoint import read_head
from outrider.engine.models.config import ModelConfig
from outrider.engine.models.weights import load_tensors, model_hash
from outrider.engine.ops import Ops
from outrider.engine.ops.eager import EagerOps
from outrider.engine.ops.reference import ReferenceOps
from outrider.engine.runner import ModelRunner

CPU = torch.device("cpu")
LENGTH, DRAFTED = 11, 4


@dataclass(frozen=True)
class Case:
    """How a head is written, and what the oracle has to know about it."""

    write: Writer
    family: str
    layer: str


def spec(**flags: bool) -> Case:
    """EAGLE 3 by speculators."""
    return Case(lambda folder: eagle3_speculators(folder, **flags), "eagle3", "layers.0.")


def author(**keys: object) -> Case:
    """EAGLE 3 by its authors with other keys in config.json."""
    return Case(lambda folder: eagle3(folder, config=keys), "eagle3", "midlayer.")


def tied(folder: Path) -> Path:
    """EAGLE 3 whose own embedding makes its logits."""
    eagle3_whole(folder)
    embedding = tiny_heads.random_tensors({"embed_tokens.weight": (VOCAB, HIDDEN)}, 20)
    return change(folder, config={"tie_word_embeddings": True}, tensors={**embedding, "lm_head.weight": None})


CASES = {
    "eagle1": Case(eagle1, "eagle1", "layers.0."),
    "eagle1-no-bias": Case(lambda folder: eagle1(folder, bias=False), "eagle1", "layers.0."),
    "eagle1-own-embedding": Case(lambda folder: eagle1(folder, embedding=True), "eagle1", "layers.0."),
    "eagle1-input-norm": Case(lambda folder: eagle1(folder, input_norm=True), "eagle1", "layers.0."),
    "hass": Case(lambda folder: eagle1(folder, para_norm=True), "eagle1", "layers.0."),
    "eagle1-speculators": Case(eagle1_speculators, "eagle1", "transformer."),
    "eagle1-speculators-bias": Case(lambda folder: eagle1_speculators(folder, bias=True), "eagle1", "transformer."),
    "eagle1-speculators-norms": Case(
        lambda folder: eagle1_speculators(folder, layernorms=True), "eagle1", "transformer."
    ),
    "eagle3": Case(eagle3, "eagle3", "midlayer."),
    "eagle3-own-embedding": Case(lambda folder: eagle3(folder, embedding=True), "eagle3", "midlayer."),
    "eagle3-narrow": Case(lambda folder: eagle3(folder, narrow=True), "eagle3", "midlayer."),
    "eagle3-whole": Case(eagle3_whole, "eagle3", "midlayer."),
    "eagle3-zero-map": Case(lambda folder: eagle3_whole(folder, zeros=True), "eagle3", "midlayer."),
    "eagle3-tied": Case(tied, "eagle3", "midlayer."),
    "eagle3-theta": author(rope_theta=500000.0),
    "eagle3-linear": author(rope_scaling={"rope_type": "linear", "factor": 4.0}),
    "eagle3-llama3": author(rope_scaling=LLAMA3_SCALING, rope_theta=300.0),
    "eagle3-rope-parameters": author(rope_parameters={"rope_theta": 700.0, **LLAMA3_SCALING}),
    "specforge": Case(specforge, "eagle3", "midlayer."),
    "specforge-other-layers": Case(lambda folder: specforge(folder, ids=(1, 3, 2)), "eagle3", "midlayer."),
    "specforge-two-taps": Case(lambda folder: specforge(folder, ids=(1, 3)), "eagle3", "midlayer."),
    "specforge-tap-norms": Case(lambda folder: specforge(folder, tap_norms=True), "eagle3", "midlayer."),
    "angelslim": Case(lambda folder: specforge(folder, rope_theta=1000000.0), "eagle3", "midlayer."),
    "speculators": spec(),
    "speculators-input-layers": Case(lambda folder: eagle3_speculators(folder, ids=(0, 3, 5)), "eagle3", "layers.0."),
    "speculators-qwen3": Case(lambda folder: eagle3_speculators(folder, kind="qwen3"), "eagle3", "layers.0."),
    "speculators-norm-before-residual": spec(norm_before_residual=True),
    "speculators-norm-before-fc": spec(norm_before_fc=True),
    "speculators-fc-norm": spec(fc_norm=True),
    "speculators-norm-output": spec(norm_output=True),
    "speculators-3.1": spec(norm_output=True, fc_norm=True, norm_before_residual=True),
    "modelopt": Case(modelopt, "eagle3", "layers.0."),
    "modelopt-no-last-norm": Case(lambda folder: modelopt(folder, last_norm=False), "eagle3", "layers.0."),
    "modelopt-of-f": Case(lambda folder: modelopt(folder, taps=False), "eagle3", "layers.0."),
    "modelopt-pair": Case(lambda folder: modelopt(folder, taps=False, wide=False), "eagle3-pair", "layers.0."),
    "mimo": Case(mimo, "mtp-reversed", "mtp_layers.0."),
    "mtp-speculators": Case(mtp_speculators, "mtp", "mtp_layers.0."),
}
EACH = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
OPS = every_ops()


def boundaries(length: int, num_layers: int = NUM_LAYERS, hidden: int = HIDDEN) -> Tensor:
    """What a target knew at each token, each boundary at a scale of its own."""
    generator = torch.Generator().manual_seed(31)
    scales = torch.linspace(0.5, 2, num_layers + 1)[:, None, None]
    return torch.randn(num_layers + 1, length, hidden, generator=generator) * scales


def computed(folder: Path, ops: Ops | None = None, length: int = LENGTH, theta: float | None = None) -> Tensor:
    """Logits that our engine computes."""
    target, ops = tiny_target(), ops or EagerOps()
    head = read_head(folder, target, theta).load(target, CPU, torch.float32, ops)[0]
    token_ids = random_ids(length + DRAFTED, VOCAB)
    return run_head(head, token_ids[:length], boundaries(length), token_ids[length:])


@dataclass(frozen=True)
class Expected:
    """Logits of an oracle, and how far rounding may carry ours."""

    logits: Tensor
    reach: float

    @classmethod
    def of(cls, oracle: HeadOracle, token_ids: list[int]) -> "Expected":
        """Logits and states of a text whose last tokens are drafted."""

        def compute() -> Tensor:
            return torch.from_numpy(oracle.logits(token_ids[:-DRAFTED], token_ids[-DRAFTED:]))

        shared = oracle.target.embedding, oracle.target.output
        return cls(compute(), reach([*oracle.tensors.values(), *shared], compute))


def expected(folder: Path, family: str, layer: str, length: int = LENGTH, theta: float | None = None) -> Expected:
    """Results of the oracle."""
    parts = tiny_target()
    arrays = [tensor.double().numpy() for tensor in (parts.embedding, parts.output, boundaries(length))]
    oracle = HeadOracle(folder, Target(*arrays), family, layer, theta)
    return Expected.of(oracle, random_ids(length + DRAFTED, VOCAB))


def difference(ours: Tensor, theirs: Expected) -> float:
    """The largest difference of a logit, in parts of what rounding may do; the same ids must be impossible."""
    assert torch.equal(ours.isinf(), theirs.logits.isinf())
    return float((ours - theirs.logits)[~ours.isinf()].abs().max() / theirs.reach)


@pytest.mark.slow
@EACH
def test_logits_are_those_of_the_oracle(tmp_path: Path, case: Case) -> None:
    """Of true rows and of drafted ones, with every set of operations that runs here."""
    folder = case.write(tmp_path / "head")
    theirs = expected(folder, case.family, case.layer)
    for ops in OPS:
        assert difference(computed(folder, ops), theirs) < 1, ops.name


@EACH
def test_matrices_take_the_wanted_type(tmp_path: Path, case: Case) -> None:
    """And norms and biases stay float32."""
    folder, target = case.write(tmp_path / "head"), tiny_target()
    head = read_head(folder, target).load(target, CPU, torch.bfloat16, ReferenceOps())[0]
    floats = [tensor for tensor in head.weights if tensor.dtype is not torch.int64]
    assert {tensor.dtype for tensor in floats if tensor.ndim > 1} == {torch.bfloat16}
    assert {tensor.dtype for tensor in floats if tensor.ndim == 1} <= {torch.float32}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle1", "eagle3", "mimo"])
def test_theta_can_be_overridden(tmp_path: Path, name: str) -> None:
    """The argument wins over the file, and shows at position 100."""
    case, length = CASES[name], 101
    folder = case.write(tmp_path / "head")
    plain, other = computed(folder, length=length), computed(folder, length=length, theta=77.0)
    theirs = expected(folder, case.family, case.layer, length, theta=77.0)
    assert difference(other, theirs) < 1
    assert difference(plain, theirs) > 100
    target = tiny_target()
    assert "rope_theta: 77" in read_head(folder, target, 77.0).notes
    _, other_hash = read_head(folder, target, 77.0).load(target, CPU, torch.float32, ReferenceOps())
    assert other_hash != read_head(folder, target).load(target, CPU, torch.float32, ReferenceOps())[1]


def test_a_missing_theta_is_10000_and_said_so(tmp_path: Path) -> None:
    """Not the target's."""
    folder = eagle3(tmp_path / "head")
    stated = eagle3(tmp_path / "stated", config={"rope_theta": 10000})
    assert "rope_theta: 10000 (default)" in read_head(folder, tiny_target()).notes
    assert "rope_theta: 10000" in read_head(stated, tiny_target()).notes
    assert torch.equal(computed(folder), computed(stated))


PLANTED: dict[str, tuple[str, Writer, Writer]] = {
    "theta": ("eagle3", eagle3, author(rope_theta=500000.0).write),
    "rope_scaling": ("eagle3", eagle3, author(rope_scaling=LLAMA3_SCALING).write),
    "taps by one": ("specforge", specforge, lambda folder: specforge(folder, ids=(1, 3, 4))),
    "nested ids are of outputs": (
        "specforge",
        specforge,
        lambda folder: change(
            specforge(folder), config={"eagle_aux_hidden_state_layer_ids": [0, 2, 4], "eagle_config": None}
        ),
    ),
    "default taps": (
        "specforge",
        lambda folder: specforge(folder, ids=(1, 2, 4)),
        lambda folder: change(specforge(folder), config={"eagle_config": None}),
    ),
    "own embedding": ("eagle3", eagle3, lambda folder: eagle3(folder, embedding=True)),
    "norm_before_residual": ("speculators", eagle3_speculators, spec(norm_before_residual=True).write),
    "norm_output": ("speculators", eagle3_speculators, spec(norm_output=True).write),
    "norm_before_fc": ("speculators", eagle3_speculators, spec(norm_before_fc=True).write),
    "fc_norm": ("speculators", eagle3_speculators, spec(fc_norm=True).write),
    "use_last_layernorm": ("modelopt", modelopt, lambda folder: modelopt(folder, last_norm=False)),
    "bias": ("eagle1", eagle1, lambda folder: eagle1(folder, bias=False)),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "one", "other"), PLANTED.values(), ids=PLANTED.keys())
def test_what_a_loader_may_lose_changes_logits(tmp_path: Path, name: str, one: Writer, other: Writer) -> None:
    """Two checkpoints that differ there only give different logits, both the oracle's: a lost switch turns this red."""
    case, length = CASES[name], 41
    folders = one(tmp_path / "one"), other(tmp_path / "other")
    # Shapes differ where a switch brings a norm along, so the shared tensors are made the same.
    mine, theirs = (tiny_heads.load_file(folder / "model.safetensors") for folder in folders)
    change(folders[1], tensors={key: mine[key] for key in theirs if key in mine})
    ours = [computed(folder, length=length) for folder in folders]
    oracles = [expected(folder, case.family, case.layer, length) for folder in folders]
    for logits, theirs_of, other_logits in zip(ours, oracles, reversed(ours), strict=True):
        assert difference(logits, theirs_of) < 1
        assert difference(other_logits, theirs_of) > 100


def test_the_halves_of_an_mtp_layer_have_an_order(tmp_path: Path) -> None:
    """The same tensors mean another head as MiMo's and as speculators': only the publisher shows which."""
    ours = mtp_speculators(tmp_path / "speculators")
    config = json.loads((ours / "config.json").read_text())
    layer = config["transformer_layer_config"]
    theirs = tiny_heads.write_head(
        tmp_path / "mimo",
        tiny_heads.FLAT | layer | {"architectures": ["MiMoForCausalLM"]},
        {f"model.{name}": tensor for name, tensor in tiny_heads.load_file(ours / "model.safetensors").items()},
    )
    logits = computed(ours), computed(theirs)
    oracle = expected(ours, "mtp", "mtp_layers.0.")
    assert difference(logits[0], oracle) < 1
    assert difference(logits[1], expected(theirs, "mtp-reversed", "mtp_layers.0.")) < 1
    assert difference(logits[1], oracle) > 100


@pytest.mark.parametrize("norm", ["token_layernorm", "hidden_layernorm", "input_layernorm", "final_layernorm"])
def test_every_norm_of_an_mtp_layer_counts(tmp_path: Path, norm: str) -> None:
    """Halving one coordinate of its weight shows."""
    folder = mtp_speculators(tmp_path / "head")
    before = computed(folder)
    weight = tiny_heads.load_file(folder / "model.safetensors")[f"mtp_layers.0.{norm}.weight"]
    change(folder, tensors={f"mtp_layers.0.{norm}.weight": weight * torch.tensor([0.5] + [1.0] * (HIDDEN - 1))})
    theirs = expected(folder, "mtp", "mtp_layers.0.")
    assert difference(computed(folder), theirs) < 1
    assert difference(before, theirs) > 10


def test_d2t_holds_offsets(tmp_path: Path) -> None:
    """Logits stand at i + d2t[i] exactly, at the ids that t2d marks, and nowhere else."""
    folder = eagle3(tmp_path / "head")
    tensors = tiny_heads.load_file(folder / "model.safetensors")
    ids = torch.arange(len(tensors["d2t"])) + tensors["d2t"]
    assert ids.diff().unique().tolist() == [2, 7]
    logits = computed(folder)
    assert torch.equal((~logits.isinf()).nonzero()[:, 1].view(len(logits), -1)[0], ids)
    # A head that only ever says one thing: row 5 of its matrix is as the norm's output, larger than all others.
    change(
        folder,
        tensors={"lm_head.weight": torch.zeros_like(tensors["lm_head.weight"]).index_fill_(0, torch.tensor([5]), 1.0)},
    )
    said = computed(folder)
    row = said[said[:, ids[5]] > 0]
    assert len(row) > 0
    assert row.argmax(1).unique().tolist() == [int(ids[5])]


def test_without_a_map_ids_are_the_targets_first(tmp_path: Path) -> None:
    """No d2t means i, and not an error or an offset."""
    folder = change(eagle3(tmp_path / "head"), tensors={"d2t": None, "t2d": None})
    logits = computed(folder)
    assert (~logits.isinf()).nonzero()[:, 1].unique().tolist() == list(range(tiny_heads.DRAFT_VOCAB))
    assert difference(logits, expected(folder, "eagle3", "midlayer.")) < 1


def test_a_heads_own_matrices_are_used(tmp_path: Path) -> None:
    """A permuted embedding, and another output matrix, change the logits as they change the oracle's."""
    target = tiny_target()
    folder = eagle1(tmp_path / "head")
    before = computed(folder)
    for name, matrix in (("embed_tokens.weight", target.embedding), ("lm_head.weight", target.output)):
        change(folder, tensors={name: matrix.roll(1, 0).contiguous()})
        after, theirs = computed(folder), expected(folder, "eagle1", "layers.0.")
        assert difference(after, theirs) < 1
        assert difference(before, theirs) > 100
        before = after


def test_copies_of_the_targets_matrices_are_shared(tmp_path: Path) -> None:
    """Equal bits are not held twice; one other bit is."""
    target = tiny_target()
    alone = eagle1(tmp_path / "alone")
    copies = {"embed_tokens.weight": target.embedding, "lm_head.weight": target.output}
    copied = change(eagle1(tmp_path / "copied"), tensors=dict(copies))
    other = target.embedding.clone()
    other[0, 0] += 0.5
    own = change(eagle1(tmp_path / "own"), tensors={"embed_tokens.weight": other})
    counts = [
        sum(
            tensor.numel()
            for tensor in read_head(folder, target).load(target, CPU, torch.float32, ReferenceOps())[0].weights
        )
        for folder in (alone, copied, own)
    ]
    assert counts == [counts[0], counts[0], counts[0] + VOCAB * HIDDEN]
    assert torch.equal(computed(alone), computed(copied))


@pytest.mark.parametrize(
    ("num_layers", "taps"),
    [(32, (2, 16, 29)), (6, (2, 3, 3)), (5, (1, 2, 4)), (4, (1, 2, 3)), (3, (1, 1, 2)), (2, (1, 1, 1))],
)
def test_default_taps(tmp_path: Path, num_layers: int, taps: tuple[int, ...]) -> None:
    """Low, middle and high; in a small target the distinct boundaries inside, and always three entries."""
    assert read_head(eagle3(tmp_path / "head"), tiny_target(num_layers=num_layers)).taps == taps


def test_the_fc_is_applied_though_widths_agree(tmp_path: Path) -> None:
    """A head as wide as three taps still has its product: 3 x 16 = 48."""
    target = tiny_target(hidden=16)
    folder = tmp_path / "head"
    shapes = tiny_heads.wide_shapes("midlayer.") | {"fc.weight": (48, 48), "embed_tokens.weight": (VOCAB, 48)}
    tiny_heads.write_head(
        folder,
        tiny_heads.FLAT | {"draft_vocab_size": tiny_heads.DRAFT_VOCAB},
        tiny_heads.random_tensors(shapes, 21) | tiny_heads.vocabulary_map(),
    )
    head = read_head(folder, target).load(target, CPU, torch.float32, ReferenceOps())[0]
    known, token_ids = boundaries(LENGTH, hidden=16), random_ids(LENGTH + DRAFTED, VOCAB)
    arrays = [tensor.double().numpy() for tensor in (target.embedding, target.output, known)]
    oracle = HeadOracle(folder, Target(*arrays), "eagle3", "midlayer.")
    theirs = Expected.of(oracle, token_ids)
    assert difference(run_head(head, token_ids[:LENGTH], known, token_ids[LENGTH:]), theirs) < 1


def test_facts_say_what_a_head_needs(tmp_path: Path) -> None:
    """Sizes, taps, and the shorter of two contexts."""
    target = tiny_target()
    narrow = read_head(eagle3(tmp_path / "narrow", narrow=True), target).load(
        target, CPU, torch.float32, ReferenceOps()
    )[0]
    facts = narrow.facts
    assert (facts.method, facts.taps, facts.state_size, facts.num_kv_layers) == ("eagle3", (2, 3, 3), 36, 1)
    assert (facts.num_kv_heads, facts.head_dim, facts.context_len, facts.max_draft_count) == (2, 16, CONTEXT_LEN, None)
    short = eagle3(tmp_path / "short", config={"max_position_embeddings": 40})
    assert read_head(short, target).load(target, CPU, torch.float32, ReferenceOps())[0].facts.context_len == 40
    assert read_head(eagle1(tmp_path / "one"), target).taps == (NUM_LAYERS,)


def test_notes_name_every_switch(tmp_path: Path) -> None:
    """What was found, and what has its default."""
    notes = read_head(eagle3_speculators(tmp_path / "head", norm_before_residual=True), tiny_target()).notes
    assert len(set(notes)) == len(notes)
    wanted = {
        "norm_before_residual: true",
        "norm_output: false (default)",
        "fc_norm: false (tensors)",
        "rope_theta: 10000",
        "rope_scaling: Rope",
        "eagle_aux_hidden_state_layer_ids: [1, 3, 4], boundaries",
        "embed_tokens: of the target",
        "lm_head: of the head",
        "vocabulary: 33 of 90 ids",
    }
    assert wanted <= set(notes)


def test_what_speculators_leaves_out_the_tensors_say(tmp_path: Path) -> None:
    """It writes no key that has its default: 32 heads, and sizes that the matrices show."""
    folder = eagle3_speculators(tmp_path / "head")
    whole = computed(
        change(folder, config={"transformer_layer_config": {"num_attention_heads": 4, "rms_norm_eps": 1e-5}})
    )
    assert difference(whole, expected(eagle3_speculators(tmp_path / "stated"), "eagle3", "layers.0.")) < 1
    notes = read_head(change(folder, config={"transformer_layer_config": {}}), tiny_target()).notes
    sizes = {"num_key_value_heads: 16", "head_dim: 2", "hidden_size: 48", "intermediate_size: 88"}
    assert {"num_attention_heads: 32 (default)", *(f"{size} (tensors)" for size in sizes)} <= set(notes)


def test_a_digest_is_the_models_hash(tmp_path: Path) -> None:
    """Equal heads share it, and other weights do not."""
    folder = eagle3(tmp_path / "head")
    _, first = read_head(folder, tiny_target()).load(tiny_target(), CPU, torch.float32, ReferenceOps())
    assert first == model_hash(folder)
    change(folder, tensors={"norm.weight": torch.ones(HIDDEN)})
    assert read_head(folder, tiny_target()).load(tiny_target(), CPU, torch.float32, ReferenceOps())[1] != first


def test_mimo_is_qwen2_with_a_layer_beside_it(tmp_path: Path) -> None:
    """The target loads without the layer, the head without the target, out of the same files."""
    folder = mimo(tmp_path / "mimo")
    assert len(list(folder.glob("*.safetensors"))) > 2
    config = ModelConfig.read(folder)
    assert (config.architecture, config.qkv_bias, config.num_layers) == ("MiMoForCausalLM", True, NUM_LAYERS)
    tensors = load_tensors(folder, config, CPU, torch.float32)[0]
    assert not any("mtp_layers" in name for name in tensors)
    twin = tmp_path / "qwen2"
    shutil.copytree(folder, twin)
    index = json.loads((twin / "model.safetensors.index.json").read_text())
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if "mtp_layers" not in name}
    (twin / "model.safetensors.index.json").write_text(json.dumps(index))
    known = json.loads((twin / "config.json").read_text()) | {"architectures": ["Qwen2ForCausalLM"], "auto_map": None}
    (twin / "config.json").write_text(json.dumps(known))
    runners = [ModelRunner.load(str(each), dtype="float32", kv_tokens=512) for each in (folder, twin)]
    logits = [all_logits(runner, random_ids(9, VOCAB), 5)[0] for runner in runners]
    assert torch.equal(*logits)
    target = tiny_target()
    head = read_head(folder, target).load(target, CPU, torch.float32, ReferenceOps())[0]
    assert sum(tensor.numel() for tensor in head.weights) == sum(
        int(np.prod(shape)) for shape in tiny_heads.mtp_shapes("").values()
    )
