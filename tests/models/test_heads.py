"""What a head computes while it learns is what it computes when it serves: row by row, with keys that grow."""

import cmath
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.rounding import reach
from torch import Tensor
from transformers import LlamaConfig

from outrider.engine.batching import RowPlan
from outrider.engine.cache import KVCache
from outrider.engine.heads.feature_head import FeatureHead, FeatureHeadConfig, Fuse
from outrider.engine.heads.head import HeadRows, TargetParts
from outrider.engine.models.rope import Rope
from outrider.engine.ops import Ops, choose_ops
from outrider.engine.ops.eager import EagerOps
from outrider.engine.ops.reference import ReferenceOps
from outrider.errors import InvalidRequest
from training import heads
from training.head_files import METHODS, HeadFiles
from training.head_run import begin_with, new_head
from training.heads import HeadShape
from training.imitate import guesses_of

VOCAB_SIZE, TARGET_SIZE, LENGTH, STEPS = 40, 24, 11, 4
THETA = 50.0  # turns fast, so that a position too many shows
CONFIG = LlamaConfig(
    vocab_size=VOCAB_SIZE, hidden_size=TARGET_SIZE, num_attention_heads=4, architectures=["LlamaForCausalLM"]
)
CPU = torch.device("cpu")


def files_of(method: str) -> HeadFiles:
    """A tiny head, narrower than its target and over every third id where its method lets it be."""
    is_narrow = method == "eagle3"
    shape = HeadShape(
        hidden_size=16 if is_narrow else TARGET_SIZE,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=20,
        steps_ahead=STEPS,
        norm_epsilon=1e-6,
        rope_theta=THETA,
        context_len=64,
    )
    return HeadFiles(
        method=method,
        shape=shape,
        taps=(1, 2, 3) if is_narrow else (4,),
        draft_ids=torch.arange(1, VOCAB_SIZE, 3) if is_narrow else torch.arange(VOCAB_SIZE),
        target="a/target",
        target_config=CONFIG,
    )


class Case:
    """A head whose every weight counts, in bfloat16 numbers, and a text with features of its own."""

    def __init__(self, method: str) -> None:
        generator = torch.Generator().manual_seed(7)

        def noise(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).bfloat16().float()

        self.method, self.files = method, files_of(method)
        self.embedding, self.output = noise(VOCAB_SIZE, TARGET_SIZE), noise(VOCAB_SIZE, TARGET_SIZE)
        self.head = new_head(self.files, self.embedding, self.output, 3)
        for parameter in self.head.parameters():
            is_gain = parameter.ndim == 1
            parameter.data.copy_((noise(*parameter.shape) * 0.3 + is_gain).bfloat16().float())
        self.weights = {name: tensor.detach() for name, tensor in self.head.state_dict().items()}
        self.token_ids = torch.randint(VOCAB_SIZE, (LENGTH,), generator=generator)
        self.features = noise(LENGTH, len(self.files.taps) * TARGET_SIZE)

    @torch.no_grad()
    def trained(self) -> list[Tensor]:
        """Logits [LENGTH - 1 - step, V'] of each step, from the unrolled forward of training."""
        return [each[0] for each in guesses_of(self.head, self.features[None], self.token_ids[None])]

    def compare(self, serve: Callable[["Case", int], list[Tensor]]) -> None:
        """Raises AssertionError where rounds after any length of the text get other logits when they are served."""
        trained = self.trained()
        assert len(trained) == STEPS
        limit = reach(
            [*self.head.parameters(), self.output], lambda: torch.cat([each.flatten() for each in self.trained()])
        )
        for row in range(LENGTH - 1):
            served = serve(self, row)
            assert len(served) == min(STEPS, LENGTH - 1 - row)
            for step, logits in enumerate(served):
                torch.testing.assert_close(trained[step][row], logits, rtol=0, atol=limit)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean() + 1e-6) * weight


def turned(vector: Tensor, position: int) -> Tensor:
    """Pairs (i, i + D/2) as complex numbers, each turned by its own angle."""
    half = len(vector) // 2
    pairs = [complex(float(vector[i]), float(vector[i + half])) for i in range(half)]
    moved = [pair * cmath.exp(1j * position * THETA ** (-i / half)) for i, pair in enumerate(pairs)]
    return torch.tensor([each.real for each in moved] + [each.imag for each in moved])


class Layer:
    """A decoder layer one row at a time, as the papers write it."""

    def __init__(self, weights: dict[str, Tensor], prefix: str) -> None:
        self.weights = {name.removeprefix(prefix): each for name, each in weights.items() if name.startswith(prefix)}
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def row(self, residual: Tensor, x: Tensor, position: int) -> Tensor:
        w, dim = self.weights, 8
        query, key, value = ((w[f"self_attn.{each}_proj.weight"] @ x).view(-1, dim) for each in "qkv")
        self.keys.append(torch.stack([turned(each, position) for each in key]))
        self.values.append(value)
        attended = []
        for number, each in enumerate(query):
            group = number * len(key) // len(query)
            scores = torch.stack([turned(each, position) @ past[group] / math.sqrt(dim) for past in self.keys])
            shares = scores.softmax(0)
            attended.append(shares @ torch.stack([past[group] for past in self.values]))
        residual = residual + w["self_attn.o_proj.weight"] @ torch.cat(attended)
        x = rms(residual, w["post_attention_layernorm.weight"])
        gate = w["mlp.gate_proj.weight"] @ x
        return residual + w["mlp.down_proj.weight"] @ (gate / (1 + torch.exp(-gate)) * (w["mlp.up_proj.weight"] @ x))


def plain_eagle3(case: Case, row: int) -> list[Tensor]:
    """The guesses after row + 2 tokens: true rows first, then each of a token after them and of the row before."""
    w, layer, found = case.weights, Layer(case.weights, "layers.0."), []
    for position in range(1, min(row + 1 + STEPS, LENGTH)):
        if position <= row + 1:
            state = w["fc.weight"] @ case.features[position - 1]
        embedded = w["embed_tokens.weight"][case.token_ids[position]]
        x = [rms(embedded, layer.weights["input_layernorm.weight"]), rms(state, layer.weights["hidden_norm.weight"])]
        state = layer.row(state, torch.cat(x), position)
        if position > row:
            found.append(w["lm_head.weight"] @ rms(state, w["norm.weight"]))
    return found


def plain_mtp(case: Case, row: int) -> list[Tensor]:
    """Guesses of a head whose rows are products, and whose state is normed."""
    layer, found = Layer(case.weights, "mtp_layers.0."), []
    w = layer.weights
    for position in range(1, min(row + 1 + STEPS, LENGTH)):
        if position <= row + 1:
            state = case.features[position - 1]
        embedded = case.embedding[case.token_ids[position]]
        pair = torch.cat([rms(embedded, w["token_layernorm.weight"]), rms(state, w["hidden_layernorm.weight"])])
        x = w["input_proj.weight"] @ pair
        state = rms(layer.row(x, rms(x, w["input_layernorm.weight"]), position), w["final_layernorm.weight"])
        if position > row:
            found.append(case.output @ state)
    return found


def plain_medusa(case: Case, row: int) -> list[Tensor]:
    """A residual block for each guess, all from one state."""
    found = []
    for step in range(min(STEPS, LENGTH - 1 - row)):
        state = case.features[row]
        inner = case.weights[f"blocks.{step}.layers.0.weight"] @ state + case.weights[f"blocks.{step}.layers.0.bias"]
        found.append(case.output @ (state + inner / (1 + torch.exp(-inner))))
    return found


def plain_mlp_speculator(case: Case, row: int) -> list[Tensor]:
    """A state that takes in a token a guess."""
    w, found = case.weights, []
    state = rms(case.features[row], torch.ones(TARGET_SIZE)) / math.sqrt(2)
    state_weight = 0.5 ** (0.5 / STEPS)
    token_weight = math.sqrt((1 - state_weight**2) * TARGET_SIZE / 2)
    for step in range(min(STEPS, LENGTH - 1 - row)):
        embedded = w["emb.0.weight"][case.token_ids[row + 1 + step]]
        product = w[f"proj.{min(step, 1)}.weight"] @ state + token_weight / state_weight * embedded
        normed = rms(product, w["ln.0.weight"]) + w["ln.0.bias"]
        state = normed * (1 + torch.erf(normed / math.sqrt(2))) / 2
        found.append(w["head.0.weight"] @ state)
    return found


PLAIN = {"eagle3": plain_eagle3, "mtp": plain_mtp, "medusa": plain_medusa, "mlp_speculator": plain_mlp_speculator}


@pytest.mark.parametrize("method", PLAIN)
def test_training_computes_what_serving_does(method: str) -> None:
    """Every step of the unrolled forward equals, after any number of tokens, what is computed one row at a time."""
    Case(method).compare(PLAIN[method])


def seen_too_much(num_rows: int, step: int) -> Tensor:
    """A wrong mask: a later step sees what its neighbours guessed."""
    return torch.ones(num_rows, num_rows, dtype=torch.bool).tril().repeat(1, step + 1)


def seen_too_little(num_rows: int, step: int) -> Tensor:
    """A wrong mask: a later step forgets the guesses before its own."""
    own = torch.eye(num_rows, dtype=torch.bool)
    parts = [torch.zeros_like(own)] * (step - 1) + [own] * (step > 0)
    return torch.cat([torch.ones_like(own).tril(), *parts], 1)


@pytest.mark.parametrize("method", ["eagle3", "mtp"])
@pytest.mark.parametrize("mask", [seen_too_much, seen_too_little])
def test_a_wrong_mask_is_found(
    monkeypatch: pytest.MonkeyPatch, method: str, mask: Callable[[int, int], Tensor]
) -> None:
    """The comparison fails for guesses that see more or less than their own round."""
    monkeypatch.setattr(heads, "seen_keys", mask)
    with pytest.raises(AssertionError):
        Case(method).compare(PLAIN[method])


NAMES = {
    "eagle3": {
        "embed_tokens": "embedding",
        "fc": "features",
        "norm": "out_norm",
        "lm_head": "head",
        "layers.0.input_layernorm": "embedding_norm",
        "layers.0.hidden_norm": "state_norm",
        "layers.0.": "layer.",
    },
    "mtp": {
        "mtp_layers.0.token_layernorm": "embedding_norm",
        "mtp_layers.0.hidden_layernorm": "state_norm",
        "mtp_layers.0.final_layernorm": "out_norm",
        "mtp_layers.0.input_proj": "fuse",
        "mtp_layers.0.": "layer.",
    },
}


def engine_head(case: Case, ops: Ops) -> FeatureHead:
    """The class that serves, with the tensors of the file."""
    shape, tensors = case.files.shape, {}
    for name, tensor in case.files.tensors(case.head.state_dict(), case.output).items():
        start = next((each for each in NAMES[case.method] if name.startswith(each)), None)
        if start is not None:
            tensors[NAMES[case.method][start] + name.removeprefix(start)] = tensor.float()
        elif name == "d2t":
            tensors["target_ids"] = tensor + torch.arange(len(tensor))
        else:
            assert name == "t2d"
    law = FeatureHeadConfig(
        method=case.method,
        taps=case.files.taps,
        hidden_size=shape.hidden_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        norm_epsilon=shape.norm_epsilon,
        rope=Rope(theta=shape.rope_theta),
        context_len=shape.context_len,
        fuse=Fuse.WIDE if case.method == "eagle3" else Fuse.PAIR,
        feeds_normed=case.method == "mtp",
    )
    return FeatureHead(law, tensors, TargetParts(case.embedding, ops.stack([case.output]), 4, 64), ops)


@pytest.mark.parametrize("ops", [EagerOps(), ReferenceOps(), choose_ops(CPU, 1)], ids=lambda ops: str(ops.name))
@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_training_computes_what_the_engine_does(method: str, ops: Ops) -> None:
    """The engine's own head, fed with the file's tensors and a real cache, finds the same logits at the same ids."""

    @torch.inference_mode()
    def serve(case: Case, row: int) -> list[Tensor]:
        head, shape, found = engine_head(case, ops), case.files.shape, []
        cache = KVCache(1, 64, shape.num_kv_heads, shape.head_dim, torch.float32, CPU)
        states = head.states_of(case.features)
        for position in range(1, min(row + 1 + STEPS, LENGTH)):
            depth = max(0, position - row - 1)
            if not depth:
                state = states[position - 1 : position]
            plan = RowPlan(
                token_ids=case.token_ids[position : position + 1],
                positions=torch.tensor([position]),
                slots=torch.tensor([position]),
                key_slots=torch.arange(1, position + 1, dtype=torch.int32),
                key_starts=torch.tensor([0]),
                key_counts=torch.tensor([position], dtype=torch.int32),
                max_key_count=position,
            )
            output, state = head.step(HeadRows(plan, cache, state, [depth]))
            if position > row:
                logits = head.logits(output, [depth])[0]
                unknown = torch.ones(VOCAB_SIZE, dtype=torch.bool)
                unknown[case.files.draft_ids] = False
                assert (logits[unknown] == -torch.inf).all()
                found.append(logits[case.files.draft_ids].clone())
        return found

    Case(method).compare(serve)


@pytest.mark.parametrize("method", METHODS)
def test_a_head_begins_with_the_weights_of_another(tmp_path: Path, method: str) -> None:
    """Those of its file; one of another shape is refused."""
    case = Case(method)
    case.files.write(case.weights, case.output, tmp_path / "head")
    other = new_head(case.files, case.embedding, case.output, 4)
    begin_with(other, tmp_path / "head")
    assert all(torch.equal(tensor, case.weights[name]) for name, tensor in other.state_dict().items())
    narrow = new_head(files_of("eagle3" if method != "eagle3" else "mtp"), case.embedding, case.output, 4)
    with pytest.raises(InvalidRequest, match="must be a head of the same method and shape"):
        begin_with(narrow, tmp_path / "head")
