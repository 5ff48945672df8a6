"""MLP speculators, Medusa, BPD and Hydra: their logits, the bits of their rows, and the files that are refused."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support.heads import tiny_chains
from support.heads.chain_oracle import chain_logits
from support.heads.head_oracle import read_tensors
from support.heads.tiny_chains import CHAINS, CONTEXT_LEN, HIDDEN, NUM_LAYERS, VOCAB, Written, tiny_target, write_chain
from support.models.engine_cases import native
from support.rounding import reach
from torch import Tensor

from outrider.engine.batching import RowPlan
from outrider.engine.cache import KVCache
from outrider.engine.heads.checkpoint import read_head
from outrider.engine.heads.head import Head, HeadRows, TargetParts
from outrider.engine.ops import Ops
from outrider.engine.ops.reference import ReferenceOps
from outrider.errors import ModelRefused

CPU = torch.device("cpu")
OPS = {"reference": ReferenceOps, "native": native}
EACH = pytest.mark.parametrize("layout", CHAINS)
BOTH = pytest.mark.parametrize("ops_name", OPS)
NUM_TEXTS, NUM_TOKENS, NUM_GUESSES = 4, 11, 2


class Row(NamedTuple):
    """The row of a text's token at a position, with the state before it."""

    text: int
    position: int
    token: int
    state: Tensor
    depth: int


@dataclass(frozen=True)
class Text:
    """f of all positions but the last, the tokens, and guesses after them."""

    number: int
    features: Tensor
    tokens: list[int]
    guesses: list[int]

    @classmethod
    def random(cls, number: int) -> "Text":
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(VOCAB, (NUM_TOKENS + NUM_GUESSES,), generator=generator).tolist()
        features = torch.randn(NUM_TOKENS - 1, HIDDEN, generator=generator)
        return cls(number, features, ids[:NUM_TOKENS], ids[NUM_TOKENS:])


class Stepper:
    """A head and a cache in which every text has slots of its own."""

    def __init__(self, head: Head) -> None:
        facts = head.facts
        self.head = head
        sizes = NUM_TEXTS * CONTEXT_LEN, facts.num_kv_heads, facts.head_dim
        self.cache = KVCache(facts.num_kv_layers, *sizes, torch.float32, CPU)
        for tensor in (*self.cache.keys, *self.cache.values):
            tensor.fill_(torch.nan)

    def step(self, rows: list[Row]) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs, states and logits of the rows, all of them wanted."""
        lists = [[row.text * CONTEXT_LEN + each for each in range(1, row.position + 1)] for row in rows]
        starts = [sum(map(len, lists[:index])) for index in range(len(lists))]
        plan = RowPlan(
            token_ids=torch.tensor([row.token for row in rows]),
            positions=torch.tensor([row.position for row in rows]),
            slots=torch.tensor([keys[-1] for keys in lists]),
            key_slots=torch.tensor([key for keys in lists for key in keys], dtype=torch.int32),
            key_starts=torch.tensor(starts),
            key_counts=torch.tensor([len(keys) for keys in lists], dtype=torch.int32),
            max_key_count=max(map(len, lists)),
        )
        depths = [row.depth for row in rows]
        outputs, states = self.head.step(HeadRows(plan, self.cache, torch.stack([row.state for row in rows]), depths))
        assert states.shape == (len(rows), self.head.facts.state_size)
        return outputs, states, self.head.logits(outputs, depths)

    def committed(self, text: Text) -> list[Row]:
        """A row for each token but the first."""
        states = self.head.states_of(text.features)
        return [Row(text.number, at, text.tokens[at], states[at - 1], 0) for at in range(1, NUM_TOKENS)]

    def rows(self, text: Text) -> list[Row]:
        """The rows that guess, one for each depth; the text's tokens are read in two pieces on the way."""
        *before, last = self.committed(text)
        self.step(before[:4])
        self.step(before[4:])
        rows = [last]
        for depth, guess in enumerate(text.guesses, 1):
            state = self.step(rows[-1:])[1][0]
            rows.append(Row(text.number, last.position + depth, guess, state, depth))
        return rows


def assert_near_oracle(folder: Path, target: TargetParts, ops: Ops, dtype: torch.dtype = torch.float32) -> None:
    stepper, text = Stepper(read_head(folder, target).load(target, CPU, dtype, ops)[0]), Text.random(0)
    logits = torch.cat([stepper.step([row])[2] for row in stepper.rows(text)])
    arrays = [tensor.double().numpy() for tensor in (target.embedding, target.output, text.features)]
    tensors = read_tensors(folder)

    def compute() -> Tensor:
        return torch.from_numpy(chain_logits(folder, tensors, *arrays, [text.tokens[-1], *text.guesses]))

    expected = compute()
    assert logits.shape == expected.shape == (1 + NUM_GUESSES, VOCAB)
    known = expected.isfinite()
    assert torch.equal(logits[~known].double(), expected[~known])
    assert (logits - expected)[known].abs().max() < reach([*tensors.values(), *arrays[:2]], compute)


@pytest.mark.slow
@EACH
@BOTH
def test_logits_are_the_oracles_at_every_depth(tmp_path: Path, layout: str, ops_name: str) -> None:
    """Each layout and flag, read from its files, against numpy that reads the same files."""
    ops = OPS[ops_name]()
    assert_near_oracle(write_chain(tmp_path, CHAINS[layout]()), tiny_target(ops), ops)


@pytest.mark.parametrize("layout", ["mlp-scaled", "hydra++", "medusa", "vllm-original-absent-map", "bpd"])
def test_matrices_may_be_bfloat16(tmp_path: Path, layout: str) -> None:
    """Files whose matrices bfloat16 can hold give the same logits in it."""
    ops = native()
    config, tensors, file = CHAINS[layout]()
    rounded = {name: tensor.bfloat16().float() if tensor.ndim == 2 else tensor for name, tensor in tensors.items()}
    folder = write_chain(tmp_path, (config, rounded, file))
    assert_near_oracle(folder, tiny_target(ops, torch.bfloat16), ops, torch.bfloat16)


@pytest.mark.slow
@EACH
@BOTH
def test_rows_of_mixed_depths_have_the_bits_of_single_rows(tmp_path: Path, layout: str, ops_name: str) -> None:
    """Four texts at every depth in one step, in an order of no meaning, and the same rows one by one."""
    ops = OPS[ops_name]()
    target = tiny_target(ops)
    stepper = Stepper(
        read_head(write_chain(tmp_path, CHAINS[layout]()), target).load(target, CPU, torch.float32, ops)[0]
    )
    rows = [row for number in range(NUM_TEXTS) for row in stepper.rows(Text.random(number))]
    rows = [rows[5 * index % len(rows)] for index in range(len(rows))]
    together = stepper.step(rows)
    for index, row in enumerate(rows):
        for alone, whole in zip(stepper.step([row]), together, strict=True):
            assert torch.equal(alone[0], whole[index])


def test_many_rows_have_the_bits_of_single_rows(tmp_path: Path) -> None:
    """More elements than one thread of torch computes alone, at sizes that fill no whole vector."""
    ops = native()
    target = tiny_target(ops)
    head = read_head(write_chain(tmp_path, tiny_chains.mlp_speculator()), target).load(target, CPU, torch.float32, ops)[
        0
    ]
    stepper = Stepper(head)
    features = torch.randn(1000, HIDDEN, generator=torch.Generator().manual_seed(7))
    rows = [Row(0, 1, index % VOCAB, state, 0) for index, state in enumerate(head.states_of(features))]
    states = stepper.step(rows)[1]
    for index in range(0, len(rows), 37):
        assert torch.equal(stepper.step(rows[index : index + 1])[1][0], states[index])


@BOTH
def test_guesses_leave_the_layer_of_hydra_plus_plus_alone(tmp_path: Path, ops_name: str) -> None:
    """Rows after guesses store no key, and rows of committed tokens store the bits that they store alone."""
    ops = OPS[ops_name]()
    target = tiny_target(ops)
    head = read_head(write_chain(tmp_path, CHAINS["hydra++"]()), target).load(target, CPU, torch.float32, ops)[0]
    text = Text.random(0)
    pieces, whole = Stepper(head), Stepper(head)
    guesses = pieces.rows(text)[1:]
    pieces.step(guesses)
    whole.step(whole.committed(text))
    for kept, expected in zip(
        (*pieces.cache.keys, *pieces.cache.values), (*whole.cache.keys, *whole.cache.values), strict=True
    ):
        assert torch.equal(kept[1:NUM_TOKENS], expected[1:NUM_TOKENS])
        assert kept[NUM_TOKENS:].isnan().all()


@EACH
def test_facts_say_what_a_head_reads_and_how_far_it_guesses(tmp_path: Path, layout: str) -> None:
    """As many guesses as there are heads in the file, a layer's sizes where there is one, and the right boundary."""
    ops = native()
    target = tiny_target(ops)
    checkpoint = read_head(write_chain(tmp_path, CHAINS[layout]()), target)
    facts = checkpoint.load(target, CPU, torch.float32, ops)[0].facts
    taps = (1,) if layout == "hydra-lower" else (NUM_LAYERS,)
    assert facts.taps == checkpoint.taps == taps
    assert facts.method == checkpoint.method
    assert facts.max_draft_count == (4 if layout.startswith("medusa") else 3)
    layer = (facts.num_kv_layers, facts.num_kv_heads, facts.head_dim)
    assert layer == ((1, 2, 12) if "++" in layout else (0, 0, 0))
    assert facts.context_len == CONTEXT_LEN


def test_a_layer_of_fewer_positions_shortens_the_text(tmp_path: Path) -> None:
    """The text after which Hydra++ guesses ends with its layer's positions."""
    ops = native()
    target = tiny_target(ops)
    folder = write_chain(tmp_path, tiny_chains.hydra(prefixed=True, max_position_embeddings=40))
    assert read_head(folder, target).load(target, CPU, torch.float32, ops)[0].facts.context_len == 40


@pytest.mark.parametrize(
    ("layout", "unread"),
    [
        ("mlp", ()),
        ("mlp-tied-copies", ("emb.1", "emb.2", "proj.2", "head.1", "head.2", "ln.1", "ln.2")),
        ("hydra-embedding", ()),
        ("hydra-ungrounded", ("input_embed_fn",)),
        ("hydra++", ("embed_tokens", "inv_freq")),
        ("medusa", ()),
        ("medusa-shared", ()),
        ("vllm-map", ("token_map",)),
        ("vllm-original", ()),
        ("bpd-own", ()),
    ],
)
def test_weights_are_the_heads_own_each_once(tmp_path: Path, layout: str, unread: tuple[str, ...]) -> None:
    """As many numbers as the file holds, without copies and what nothing reads."""
    ops = native()
    target = tiny_target(ops)
    written = CHAINS[layout]()
    head = read_head(write_chain(tmp_path, written), target).load(target, CPU, torch.float32, ops)[0]
    expected = sum(tensor.numel() for name, tensor in written[1].items() if not any(part in name for part in unread))
    assert sum(tensor.numel() for tensor in head.weights) == expected


def test_a_copy_of_the_targets_embedding_is_not_kept(tmp_path: Path) -> None:
    """Hydra's files hold one."""
    ops = native()
    target = tiny_target(ops)
    config, tensors, file = tiny_chains.hydra()
    copied = {**tensors, "input_embed_fn.weight": target.embedding.clone()}
    head = read_head(write_chain(tmp_path, (config, copied, file)), target).load(target, CPU, torch.float32, ops)[0]
    assert sum(tensor.numel() for tensor in head.weights) == sum(tensor.numel() for tensor in tensors.values())


def test_prefixes_of_names_may_be_there_or_not(tmp_path: Path) -> None:
    """Writers differ in them; the logits do not."""
    ops = native()
    target = tiny_target(ops)
    for number, (layout, old, new) in enumerate(
        [("mlp", "speculator.", ""), ("medusa", "", "medusa_head."), ("vllm", "", "medusa_heads.")]
    ):
        config, tensors, file = CHAINS[layout]()
        renamed = {new + name.removeprefix(old): tensor for name, tensor in tensors.items()}
        folders = (tmp_path / f"{number}-old", tmp_path / f"{number}-new")
        write_chain(folders[0], (config, tensors, file))
        write_chain(folders[1], (config, renamed, file))
        steppers = [Stepper(read_head(folder, target).load(target, CPU, torch.float32, ops)[0]) for folder in folders]
        one, other = (stepper.step(stepper.rows(Text.random(0)))[2] for stepper in steppers)
        assert torch.equal(one, other)


def test_notes_name_every_flag_and_whether_it_was_found(tmp_path: Path) -> None:
    """A default that was not seen is the usual reason for a head that guesses badly."""
    target = tiny_target(native())
    notes = {layout: read_head(write_chain(tmp_path / layout, CHAINS[layout]()), target).notes for layout in CHAINS}
    assert notes["mlp"] == (
        "n_predict is 3",
        "inner_dim is 51",
        "tie_weights is False",
        "scale_input is False by default",
    )
    assert "4 heads in the file, medusa_num_heads is 2" in notes["medusa"]
    assert "the heads' output matrices are the target's" in notes["medusa-shared"]
    assert "original_lm_head is True" in notes["vllm-original"]
    assert "the output matrix is the target's" in notes["bpd"]
    assert "head_dim is 12 by default" in notes["hydra++"]
    assert "nothing reads prefix_embeding_layer.embed_tokens.weight" in notes["hydra++"]


@pytest.mark.parametrize("layout", ["mlp", "medusa", "hydra"])
def test_a_digest_names_what_the_files_hold(tmp_path: Path, layout: str) -> None:
    """It is the same for a copy, and another one when a tensor changes."""
    target = tiny_target(native())
    config, tensors, file = CHAINS[layout]()
    changed = {**tensors, (name := min(tensors)): tensors[name] + 1}
    same, copy, other = (
        read_head(write_chain(tmp_path / name, (config, each, file)), target).load(
            target, CPU, torch.float32, native()
        )[1]
        for name, each in (("same", tensors), ("copy", tensors), ("other", changed))
    )
    assert same == copy != other


def test_a_heads_file_goes_before_a_model_in_the_same_folder(tmp_path: Path) -> None:
    """A model and its heads may lie together when each has a file of its own."""
    ops = native()
    target = tiny_target(ops)
    folder = write_chain(tmp_path, CHAINS["medusa"]())
    write_chain(tmp_path / "other", CHAINS["bpd"]())
    (tmp_path / "other" / "model.safetensors").rename(tmp_path / "model.safetensors")
    assert read_head(folder, target).load(target, CPU, torch.float32, ops)[0].facts.max_draft_count == 4


def changed(written: Written, keys: dict[str, Any] | None = None, **tensors: Tensor | None) -> Written:
    """With other keys and tensors; None takes one away, and `__` stands for a dot."""
    config, held, file = written
    edits = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    kept = {name: tensor for name, tensor in (held | edits).items() if tensor is not None}
    return {**config, **(keys or {})}, kept, file


def ids(*values: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


MLP, HYDRA, MEDUSA = tiny_chains.mlp_speculator, tiny_chains.hydra, tiny_chains.medusa
VLLM, BPD = tiny_chains.vllm_medusa, tiny_chains.bpd
PLUS = partial(HYDRA, prefixed=True)
REFUSED: dict[str, tuple[Written, str]] = {
    "lstm": (
        changed(MLP(), {"architectures": ["ArcticLSTMSpeculatorPreTrainedModel"]}),
        "\"architectures\" is ['ArcticLSTMSpeculatorPreTrainedModel'], but only the cells of MLPSpeculatorPreTrained",
    ),
    "mlp of another width": (changed(MLP(), {"emb_dim": 64}), '"emb_dim" is 64, but the target has 48'),
    "mlp of other tokens": (changed(MLP(), {"vocab_size": 299}), '"vocab_size" is 299, but the target has 300'),
    "no depth": (changed(MLP(), {"n_predict": 0}), '"n_predict" is 0, but must be an integer from 1 to 64'),
    "a flag that is none": (changed(MLP(), {"tie_weights": "yes"}), "\"tie_weights\" is 'yes', but must be true or"),
    "a depth too few": (changed(MLP(), {"n_predict": 4}), "lacks the tensor emb.3.weight and 4 more tensors"),
    "a depth too many": (
        changed(MLP(), {"n_predict": 2}),
        "holds the tensor speculator.emb.2.weight, which config.json",
    ),
    "tied but unequal": (
        changed(MLP(tied=True, copied=True), speculator__proj__2__weight=torch.zeros(51, 51)),
        "speculator.proj.2.weight differs from proj.1.weight, but tie_weights makes them one",
    ),
    "untied without tensors": (changed(MLP(tied=True), {"tie_weights": False}), "lacks the tensor emb.1.weight"),
    "both names": (
        changed(MLP(), emb__0__weight=torch.zeros(1)),
        "holds a tensor both with and without the prefix speculator.",
    ),
    "quantized": (
        changed(MLP(), speculator__ln__0__bias=ids(*[0] * 51, dtype=torch.int8)),
        "speculator.ln.0.bias has the type I8, but must have one of BF16, F16, F32",
    ),
    "cross attention": (
        changed(HYDRA(), {"hydra_head_arch": "cross-attn"}),
        '"hydra_head_arch" is \'cross-attn\', but must be "mlp" or "prefix-mlp"',
    ),
    "below the embedding": (
        changed(HYDRA(), {"hidden_state_offset": 3}),
        '"hidden_state_offset" is 3, but must be an integer from 0 to 2',
    ),
    "grounded by a flag only": (
        changed(HYDRA(), {"grounded_heads": False}),
        "hydra_mlp.0.0.linear.weight has the shape [48, 96], but config.json with this target asks for [48, 48]",
    ),
    "a layer by a flag only": (
        changed(HYDRA(), {"hydra_head_arch": "prefix-mlp", "num_attention_heads": 4}),
        "which config.json with this target does not ask for",
    ),
    "unknown heads": (changed(PLUS(), {"num_attention_heads": None}), '"num_attention_heads" is missing'),
    "uneven groups": (
        changed(PLUS(), {"num_key_value_heads": 3}),
        '"num_key_value_heads" is 3, which does not divide 4',
    ),
    "odd heads": (
        changed(PLUS(), {"head_dim": 11}),
        '"head_dim" is 11, but rotary embeddings need an even number',
    ),
    "another activation": (changed(PLUS(), {"hidden_act": "gelu"}), '"hidden_act" is \'gelu\', but must be "silu"'),
    "unknown positions": (
        changed(PLUS(), {"rope_scaling": {"type": "longrope"}}),
        "\"rope_scaling.rope_type\" is 'longrope', but must be one of default",
    ),
    "no layer": (
        changed(PLUS(), prefix_embeding_layer__norm__weight=None),
        "lacks the tensor prefix_embeding_layer.norm.weight",
    ),
    "a merged model": (
        changed(MEDUSA(), model__norm__weight=torch.zeros(48)),
        "holds a whole model with Medusa heads in it, which fit no other model: put the model and its heads into",
    ),
    "no heads": (({"medusa_num_heads": 2}, {}, "medusa_lm_head.safetensors"), "lacks the tensor 0.0.linear.bias"),
    "half of the matrices": (changed(MEDUSA(), **{"2__1__weight": None}), "lacks the tensor 2.1.weight"),
    "a head left out": (
        changed(MEDUSA(), **{"1__1__weight": None, "1__0__linear__weight": None, "1__0__linear__bias": None}),
        "holds the tensor 3.0.linear.bias, which config.json with this target does not ask for",
    ),
    "more blocks than said": (
        changed(MEDUSA(layers=2), {"medusa_num_layers": 1}),
        "which config.json with this target does not ask for",
    ),
    "another vocabulary": (
        changed(MEDUSA(), **{"0__1__weight": torch.zeros(301, 48)}),
        "0.1.weight has the shape [301, 48], but config.json with this target asks for [300, 48]",
    ),
    "vllm of another width": (changed(VLLM(), {"hidden_size": 64}), '"hidden_size" is 64, but the target has 48'),
    "scaled logits": (
        changed(VLLM(), {"logit_scale": 0.5}),
        '"logit_scale" is 0.5, but only logits without a scale are served',
    ),
    "no map": (
        changed(VLLM(), {"truncated_vocab_size": 37}),
        '"truncated_vocab_size" is 37 of 300 tokens, but the file has no token_map',
    ),
    "a map for nothing": (
        changed(VLLM(known=37), {"truncated_vocab_size": None}),
        '"truncated_vocab_size" is 300 of 300 tokens, but the file has a token_map',
    ),
    "more than all tokens": (
        changed(VLLM(), {"truncated_vocab_size": 301}),
        '"truncated_vocab_size" is 301, but must be an integer from 1 to 300',
    ),
    "a short map": (
        changed(VLLM(known=3), token_map=ids(1, 2)),
        "token_map is I64 [2], but must be I32 or I64 [3]",
    ),
    "a map of fractions": (
        changed(VLLM(known=3), token_map=torch.zeros(3)),
        "token_map is F32 [3], but must be I32 or I64 [3]",
    ),
    "a map out of the vocabulary": (
        changed(VLLM(known=3), token_map=ids(1, 300, 2)),
        "token_map names tokens from 1 to 300, but the target has 0 to 299",
    ),
    "a map of one token twice": (changed(VLLM(known=3), token_map=ids(1, 2, 1)), "token_map names a token twice"),
    "biases that no flag names": (changed(VLLM(bias=True), {"medusa_fc_bias": False}), "blocks.0.layers.0.bias, which"),
    "bpd without a size": (changed(BPD(), {"intermediate_size": None}), '"intermediate_size" is missing'),
    "bpd of another width": (changed(BPD(), {"hidden_size": 64}), '"hidden_size" is 64, but the target has 48'),
    "bpd without a bias": (changed(BPD(), heads__1__up__bias=None), "lacks the tensor heads.1.up.bias"),
}


@pytest.mark.parametrize(("written", "sentence"), REFUSED.values(), ids=REFUSED)
def test_one_sentence_refuses_a_file(tmp_path: Path, written: Written, sentence: str) -> None:
    """What is missing, misshapen or never read, before anything of it computes."""
    ops = native()
    target = tiny_target(ops)
    folder = write_chain(tmp_path, written)
    with pytest.raises(ModelRefused) as caught:
        read_head(folder, target).load(target, CPU, torch.float32, ops)
    assert sentence in str(caught.value)
    assert str(folder) in str(caught.value)
    assert str(caught.value).count("\n") == 0


def test_pickled_heads_stay_closed(tmp_path: Path) -> None:
    """The authors publish Medusa and Hydra as .pt files."""
    write_chain(tmp_path, CHAINS["medusa"]())
    (tmp_path / "medusa_lm_head.safetensors").rename(tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ModelRefused, match="is pickled, which can run code: `outrider convert-head"):
        read_head(tmp_path, tiny_target(native()))
