"""Drafting heads as they are trained: over whole blocks of text, every row a round that might begin there.

EAGLE-3: Li et al., 2025, arXiv 2503.01840, with its training-time test. MTP: DeepSeek-AI, 2024, arXiv 2412.19437.
Medusa: Cai et al., 2024, arXiv 2401.10774. MLP speculator: Wertheimer et al., 2024, arXiv 2404.19124.

`guesses` of every head takes the target's features [B, L, F] and the text [B, L], and yields for each step ahead logits
[B, L - 1 - step, V] over the ids that the head knows: row m of step s is its guess of the target's distribution at row
m + 1 + s, made of the features at row m and of the tokens up to m + 1 + s. Parameters have the names of their files.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding as looked_up
from torch.nn.functional import gelu, linear, scaled_dot_product_attention, silu

from outrider.engine.models.rope import Rope, rotary_tables

INITIAL_DEVIATION = 0.02
Memory = list[tuple[Tensor, Tensor]]
"""Keys and values [B, G, rows, D] of the steps so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """Sizes of a head, whatever of them its method has."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    steps_ahead: int
    """Steps that it is trained for, and heads of one that has a head for each."""
    norm_epsilon: float
    rope_theta: float
    context_len: int


def seen_keys(num_rows: int, step: int) -> Tensor:
    """Keys that the rows of a step see [num_rows, (step + 1) * num_rows]: keys of step 0, then of each later one.

    A row continues the text up to its own key of step 0 by guesses of its own, so of the later steps it sees its own
    keys alone: those beside them belong to rounds that began elsewhere.
    """
    own = torch.eye(num_rows, dtype=torch.bool)
    return torch.cat([torch.ones_like(own).tril(), *[own] * step], 1)


class TrainedLayer(nn.Module):
    """A Llama layer whose attention reads vectors of any width; subclasses add the norms before it."""

    def __init__(self, shape: HeadShape, width: int) -> None:
        super().__init__()
        h, query, key = shape.hidden_size, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.head_dim = shape.head_dim
        self.self_attn = nn.ModuleDict(
            {"q_proj": matrix(width, query), "k_proj": matrix(width, key), "v_proj": matrix(width, key)}
            | {"o_proj": matrix(query, h)}
        )
        self.post_attention_layernorm = nn.RMSNorm(h, shape.norm_epsilon)
        inner = shape.intermediate_size
        self.mlp = nn.ModuleDict(
            {"gate_proj": matrix(h, inner), "up_proj": matrix(h, inner), "down_proj": matrix(inner, h)}
        )
        tables = rotary_tables(Rope(theta=shape.rope_theta), shape.head_dim, shape.context_len, torch.device("cpu"))
        for name, table in zip(("cos", "sin"), tables, strict=True):
            self.register_buffer(name, table, persistent=False)

    def decode(self, residual: Tensor, x: Tensor, memory: Memory) -> Tensor:
        """State that leaves the layer [B, rows, h] in the step after those in the memory, which it joins."""
        (batch, rows, _), step = x.shape, len(memory)
        query, key, value = (
            self.self_attn[name](x).view(batch, rows, -1, self.head_dim).transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        # Row m of step 0 is that of token m + 1, and the first token has none.
        positions = slice(1 + step, 1 + step + rows)
        cos, sin = self.get_buffer("cos")[positions], self.get_buffer("sin")[positions]
        memory.append((rotated(key, cos, sin), value))
        keys, values = (torch.cat([each[:, :, :rows] for each in part], 2) for part in zip(*memory, strict=True))
        mask = seen_keys(rows, step).to(x.device)
        attended = scaled_dot_product_attention(rotated(query, cos, sin), keys, values, attn_mask=mask, enable_gqa=True)
        residual = residual + self.self_attn["o_proj"](attended.transpose(1, 2).flatten(2))
        x = self.post_attention_layernorm(residual)
        moved: Tensor = self.mlp["down_proj"](silu(self.mlp["gate_proj"](x)) * self.mlp["up_proj"](x))
        return residual + moved


class EagleLayer(TrainedLayer):
    """EAGLE-3's, whose attention reads the embedding and the state side by side."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__(shape, 2 * shape.hidden_size)
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, shape.norm_epsilon)
        self.hidden_norm = nn.RMSNorm(shape.hidden_size, shape.norm_epsilon)

    def forward(self, embedded: Tensor, states: Tensor, memory: Memory) -> Tensor:
        x = torch.cat([self.input_layernorm(embedded), self.hidden_norm(states)], -1)
        return self.decode(states, x, memory)


class MtpLayer(TrainedLayer):
    """MTP's, whose rows are products with the embedding and the state side by side."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__(shape, shape.hidden_size)
        self.token_layernorm = nn.RMSNorm(shape.hidden_size, shape.norm_epsilon)
        self.hidden_layernorm = nn.RMSNorm(shape.hidden_size, shape.norm_epsilon)
        self.input_proj = matrix(2 * shape.hidden_size, shape.hidden_size)
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, shape.norm_epsilon)
        self.final_layernorm = nn.RMSNorm(shape.hidden_size, shape.norm_epsilon)

    def forward(self, embedded: Tensor, states: Tensor, memory: Memory) -> Tensor:
        x = torch.cat([self.token_layernorm(embedded), self.hidden_layernorm(states)], -1)
        x = self.input_proj(x).float()
        output: Tensor = self.final_layernorm(self.decode(x, self.input_layernorm(x), memory))
        return output


class Eagle3(nn.Module):
    """A head of any width up to the target's, over all its ids or the `draft_ids` [V'] of them, in rising order.

    A narrower one has an embedding of its own. It begins, and so does its output matrix, as what the principal
    directions of the target's keep of them. Fed back is what leaves the layer, without a norm.
    """

    def __init__(self, shape: HeadShape, num_taps: int, embedding: Tensor, output: Tensor, draft_ids: Tensor) -> None:
        super().__init__()
        h, target_size = shape.hidden_size, embedding.shape[1]
        self.steps_ahead = shape.steps_ahead
        self.fc = matrix(num_taps * target_size, h)
        self.layers = nn.ModuleList([EagleLayer(shape)])
        self.norm = nn.RMSNorm(h, shape.norm_epsilon)
        self.lm_head = matrix(h, len(draft_ids))
        self.embed_tokens: nn.Embedding | None = None
        self.register_buffer("target_embedding", embedding, persistent=False)
        if h < target_size:
            directions = torch.linalg.eigh(output.double().T @ output.double())[1][:, -h:].float()
            embedding, output = embedding @ directions, output @ directions
            self.embed_tokens = nn.Embedding(len(embedding), h, _weight=embedding)
        self.lm_head.weight.data.copy_(output[draft_ids])

    def guesses(self, features: Tensor, token_ids: Tensor) -> Iterator[Tensor]:
        for normed in self.normed_states(features, token_ids):
            yield self.lm_head(normed)

    def normed_states(self, features: Tensor, token_ids: Tensor) -> Iterator[Tensor]:
        """Inputs of the output matrix [B, L - 1 - step, h] at each step ahead, for losses that want few rows of it."""
        memory, states = Memory(), self.fc(features[:, :-1]).float()
        own = self.embed_tokens
        table = self.get_buffer("target_embedding") if own is None else own.weight
        for step in range(self.steps_ahead):
            embedded = looked_up(token_ids[:, 1 + step :], table)
            states = self.layers[0](embedded, states[:, : embedded.shape[1]], memory)
            yield self.norm(states)


class Mtp(nn.Module):
    """One layer as wide as the target, with the target's embedding and output matrix; fed back is what leaves its norm.

    It reads what leaves the target's final norm.
    """

    def __init__(self, shape: HeadShape, embedding: Tensor, output: Tensor) -> None:
        super().__init__()
        self.steps_ahead = shape.steps_ahead
        self.mtp_layers = nn.ModuleList([MtpLayer(shape)])
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("output", output, persistent=False)

    def guesses(self, features: Tensor, token_ids: Tensor) -> Iterator[Tensor]:
        memory, states = Memory(), features[:, :-1]
        for step in range(self.steps_ahead):
            embedded = self.get_buffer("embedding")[token_ids[:, 1 + step :]]
            states = self.mtp_layers[0](embedded, states[:, : embedded.shape[1]], memory)
            yield linear(states, self.get_buffer("output"))


class ResidualBlock(nn.Module):
    """Medusa's, which begins as nothing."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(size, size)])
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        for each in self.layers:
            x = x + silu(each(x))
        return x


class Medusa(nn.Module):
    """A residual block for each step ahead, on what leaves the target's final norm; the output matrix is the target's.

    So before the first step of training every block guesses the token that is known already.
    """

    def __init__(self, shape: HeadShape, output: Tensor) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ResidualBlock(shape.hidden_size) for _ in range(shape.steps_ahead))
        self.register_buffer("output", output, persistent=False)

    def guesses(self, features: Tensor, token_ids: Tensor) -> Iterator[Tensor]:
        for step, block in enumerate(self.blocks):
            states = block(features[:, : token_ids.shape[1] - 1 - step])
            yield linear(states, self.get_buffer("output"))


class TrainedMlpSpeculator(nn.Module):
    """A state without attention, from what leaves the target's final norm and from each token after it.

    The weights of all steps are the same, but for the first product, which reads the target's width.
    """

    def __init__(self, shape: HeadShape, target_size: int, vocab_size: int) -> None:
        super().__init__()
        inner, self.steps_ahead = shape.hidden_size, shape.steps_ahead
        self.state_weight = 0.5 ** (0.5 / shape.steps_ahead)
        self.token_weight = math.sqrt((1 - self.state_weight**2) * inner / 2)
        vectors = torch.randn(vocab_size, inner) * inner**-0.5
        self.emb = nn.ModuleList([nn.Embedding(vocab_size, inner, _weight=vectors)])
        self.proj = nn.ModuleList([matrix(target_size, inner), matrix(inner, inner)][: shape.steps_ahead])
        self.head = nn.ModuleList([matrix(inner, vocab_size)])
        self.ln = nn.ModuleList([BiasedRMSNorm(inner)])

    def guesses(self, features: Tensor, token_ids: Tensor) -> Iterator[Tensor]:
        states = nn.functional.rms_norm(features[:, :-1], features.shape[-1:], eps=1e-6) / math.sqrt(2)
        for step in range(self.steps_ahead):
            embedded = self.emb[0](token_ids[:, 1 + step :])
            product = self.proj[min(step, 1)](states[:, : embedded.shape[1]]).float()
            states = gelu(self.ln[0](product + self.token_weight / self.state_weight * embedded))
            yield self.head[0](states)


class BiasedRMSNorm(nn.RMSNorm):
    """RMSNorm that adds a bias."""

    def __init__(self, size: int) -> None:
        super().__init__(size, 1e-6)
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.bias


def matrix(inputs: int, outputs: int) -> nn.Linear:
    """A product without bias, with small random weights."""
    made = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(made.weight, std=INITIAL_DEVIATION)
    return made


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Vectors [..., rows, D], each turned by its row of the tables [rows, D/2]."""
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
