"""A model that computes no matrices: a formula says how long a forward takes, and a hash which token comes next.

The next token of a row is a hash of its position and of the last tokens that it sees, read from the paged cache by the
row's own list of slots. So a row has the same logits whatever shares its forward and however its prompt was cut, and
other ones if a block were lost or mixed up. Other hashes of the same context say which choice of a draft that token is,
and how sure the draft may be: half of all contexts are easy ones, where it errs less often, and says so.
"""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.engine.batching import RowPlan
from outrider.engine.cache import KVCache
from outrider.engine.models.config import DecoderFacts, read_eos_token_ids
from outrider.engine.models.decoder import MEMORY_SHARE, Decoder
from outrider.engine.models.json_keys import JsonKeys, read_json
from outrider.engine.noise import UNIFORM_SHIFT, UNIFORM_STEP, Words, numpy_hash_words
from outrider.engine.ops import Ops, Weight
from outrider.errors import ModelRefused
from outrider.model_files.memory import CacheSize
from outrider.model_files.model_names import SIM_CONTEXT_LEN, SimulatedModel, tokenizer_source

FORMAT_VERSION = 1
# Tokens that the next one depends on: two answers that differ meet again only by eight equal tokens in one place.
WINDOW = 8
# Odd, so that none loses a bit of its token: one for the position, one for each token.
WEIGHTS: Words = numpy_hash_words(np.zeros(1, dtype=np.uint64), 1 + WINDOW)[0] | np.uint64(1)
# Above the others by more than all noise (36.8 to -3.7) at a temperature of 2, so that every seed draws it.
PEAK = 100.0
# Of a draft with choices: its logits are so many times the logarithms of their chances, so that noise of temperatures
# up to 1 changes few first choices, and a tree's scale is within what outrider.drafters.scales fits.
SHARPNESS = 2.0
# How much less a draft errs in easy contexts, and how much more in the others, as a share of its errors. Assumed.
SPREAD = 0.8
# What a wake-up that came late takes off the next wait, at most: more is a host that has too much to do.
MAX_CREDIT_S = 0.00025


@dataclass(frozen=True, slots=True)
class SimulatedCheckpoint:
    """A simulated model that can be made, with the tokenizer of the embedded target."""

    model: SimulatedModel
    folder: Path
    config: DecoderFacts
    modelling: str = "simulated"
    block_dtype: str = ""

    @classmethod
    def of(cls, model: SimulatedModel) -> Self:
        """Raises ModelRefused when the embedded target is missing."""
        folder = Path(tokenizer_source(model.name))
        keys = JsonKeys(folder / "config.json", read_json(folder / "config.json"))
        config = DecoderFacts(
            vocab_size=keys.integer("vocab_size"),
            # One number for a token's id and one for its position: the smallest cache that can be read wrongly.
            num_layers=1,
            num_kv_heads=1,
            head_dim=1,
            context_len=SIM_CONTEXT_LEN,
            eos_token_ids=read_eos_token_ids(folder, keys),
        )
        return cls(model, folder, config)

    @property
    def name(self) -> str:
        return self.model.name

    def build(self, device: torch.device, dtype: torch.dtype | None, ops: Ops) -> tuple["SimulatedDecoder", str]:
        if device.type != "cpu":
            message = f"{self.name}: device is {device}, but must be cpu, which simulates another"
            raise ModelRefused(message, device=device)
        if dtype is not torch.bfloat16:
            given = str(dtype).removeprefix("torch.")
            message = f"{self.name}: dtype is {given}, but must be bfloat16, which its law counts"
            raise ModelRefused(message, dtype=given)
        return SimulatedDecoder(self.model, self.config, ops), self.digest()

    def digest(self) -> str:
        return hashlib.sha256(f"simulated {FORMAT_VERSION} {self.model}".encode()).hexdigest()[:32]


class SimulatedDecoder(Decoder):
    """Gives logits at once; `finish` lets pass what the device that it stands for would have taken."""

    def __init__(self, model: SimulatedModel, config: DecoderFacts, ops: Ops) -> None:
        self.model = model
        self.config = config
        self.ops = ops
        self.embedding = torch.empty(0)
        # No answer ends by itself, unless its end is asked for.
        self._ordinary = np.setdiff1d(np.arange(config.vocab_size), list(config.eos_token_ids))
        # [2, ranks]: in easy contexts and in the others.
        rates = np.array([rates_of(model.acceptance, is_easy=is_easy) for is_easy in (True, False)])
        self._reached = rates.cumsum(axis=1)
        each_other = (1 - rates.sum(axis=1, keepdims=True)) / (len(self._ordinary) - rates.shape[1])
        has_choices = rates.shape[1] > 1
        self._heights = SHARPNESS * np.log(rates / each_other) if has_choices else np.full_like(rates, PEAK)
        # Zero but for the peaks of each row, which the next forward takes away: to zero all of it would cost more.
        self._logits = torch.zeros(0, config.vocab_size)
        self._peaks = torch.empty(0, dtype=torch.int64)
        self._step_s = self._credit_s = 0.0

    @property
    def weights(self) -> Sequence[Weight]:
        # Counted in facts, and never in memory.
        return (torch.empty(self.model.parameter_count, dtype=torch.bfloat16, device="meta"),)

    @property
    def device_name(self) -> str:
        return f"simulated {self.model.device.name}"

    def fit_cache(
        self, kv_tokens: int | None = None, context_len: int | None = None, memory_share: float = MEMORY_SHARE
    ) -> CacheSize:
        """By default the tokens that the memory of the device would hold."""
        num_tokens = kv_tokens or self.model.kv_tokens
        reason = f"{num_tokens:,} tokens, as {'asked for' if kv_tokens else 'the simulated device would hold'}"
        return CacheSize(num_tokens, context_len or self.config.context_len, reason)

    def forward(self, plan: RowPlan, cache: KVCache, wanted: Tensor) -> Tensor:
        """Computes rows like any Decoder; the logits hold until the next forward."""
        stored = cache.keys[0].view(-1)
        # The leaves of a tree list the same prefix, and it is read once.
        is_read = np.zeros(len(stored), dtype=bool)
        is_read[plan.key_slots.numpy()] = True
        num_keys = int(np.count_nonzero(is_read))
        self._step_s = self.model.step_s(plan.num_rows, num_keys, int(plan.key_counts.sum()))
        stored[plan.slots] = plan.token_ids.float()
        cache.values[0].view(-1)[plan.slots] = plan.positions.float()
        behind = torch.minimum(torch.arange(WINDOW)[None], plan.key_counts[wanted, None] - 1)
        places = (plan.key_starts + plan.key_counts - 1)[wanted, None] - behind
        seen = stored[plan.key_slots[places].long()].numpy().astype(np.uint64)
        token_ids, heights = self.choices(plan.positions[wanted].numpy(), seen)
        num_rows = len(token_ids)
        self._logits.view(-1)[self._peaks] = 0
        if num_rows > len(self._logits):
            self._logits = torch.zeros(num_rows, self.config.vocab_size)
        peaks = np.arange(num_rows)[:, None] * self.config.vocab_size + token_ids
        self._peaks = torch.from_numpy(peaks.reshape(-1))
        self._logits.view(-1)[self._peaks] = torch.from_numpy(heights.reshape(-1)).float()
        return self._logits[:num_rows]

    def finish(self, started_s: float) -> float:
        """Waits for the end of the forward's time, and returns that time in seconds.

        Whatever has been done since the forward began, draws among it, counts as done by the device meanwhile.
        """
        ends_s = started_s + self._step_s - self._credit_s
        self._credit_s = 0.0
        if (left_s := ends_s - time.perf_counter()) > 0:
            time.sleep(left_s)
            self._credit_s = min(time.perf_counter() - ends_s, MAX_CREDIT_S)
        return self._step_s

    def choices(self, positions: NDArray[np.int64], seen: Words) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Choices of each row, the first one first, and their logits, both [R, ranks]; all other tokens' logits are 0.

        Rows are at these positions and see these tokens [R, WINDOW], their own first.
        """
        keys = positions.astype(np.uint64) * WEIGHTS[0] + (seen * WEIGHTS[1:]).sum(axis=1, dtype=np.uint64)
        words, count = numpy_hash_words(keys, 4), len(self._ordinary)
        named = (words[:, :1] % np.uint64(count)).astype(np.int64)
        uniforms = (words[:, 1:2] >> np.uint64(UNIFORM_SHIFT)).astype(np.float64) * UNIFORM_STEP
        # The kind of context: 0 is an easy one.
        kinds = words[:, 3] >> np.uint64(63)
        # Rank of the token that is named; after all choices it is none of them.
        rank = (uniforms >= self._reached[kinds]).sum(axis=1, keepdims=True)
        places = np.arange(self._reached.shape[1])
        steps = (words[:, 2:3] % np.uint64(count - 1)).astype(np.int64) + places - (places > rank)
        others = (named + 1 + steps % (count - 1)) % count
        return self._ordinary[np.where(places == rank, named, others)], self._heights[kinds]


def rates_of(acceptance: Sequence[float], *, is_easy: bool) -> list[float]:
    """The chance of each choice to be right in one kind of context; over both kinds their mean is the acceptance.

    Whatever the first choice misses is multiplied with one number, of which the others get their parts; where there is
    one choice, kinds are alike. In no context is the second choice as likely as the first.
    """
    first, *others = acceptance
    if not others:
        return [first]
    spread = min(SPREAD, 0.9 * (1 / (1 - first + others[0]) - 1))
    errs = 1 - spread if is_easy else 1 + spread
    return [1 - errs * (1 - first), *(errs * each for each in others)]
