"""A model of transformers as the runner wants it: the rows of a plan in, logits of the wanted rows out.

All rows of a forward go through the model as one sequence with positions of their own; what a row sees is decided in
our attention. On the CPU each row's bits are independent of the others: products and attention are ours, and torch's
elementwise functions and norms see whole vectors (padding) in one thread (products). This was tested for the families
in tests/outrider/engine/fallback; a model that mixes rows in a way of its own is refused in survey. There is no such
promise on CUDA.
"""

from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel

from outrider.engine.fallback.attention import Pages
from outrider.engine.fallback.experts import Company, introduce
from outrider.engine.fallback.padding import STEP, pad_index, padded
from outrider.engine.fallback.products import Products, one_thread
from outrider.engine.kv_cache import KVCache
from outrider.engine.ops import Ops
from outrider.engine.plan import RowPlan


@dataclass(frozen=True, slots=True)
class FallbackConfig:
    """Sizes and limits; see outrider.engine.decoder.DecoderFacts."""

    vocab_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    context_len: int
    eos_token_ids: frozenset[int]


class FallbackDecoder:
    """transformers' modelling code with our attention, cache and products; belongs to the device thread."""

    def __init__(self, config: FallbackConfig, model: PreTrainedModel, ops: Ops) -> None:
        """Takes a model whose weights are those that ops read (outrider.engine.fallback.loading)."""
        self.config = config
        self.ops = ops
        self._model = model
        self._head: Tensor = model.get_output_embeddings().weight
        self._company = Company()
        introduce(model, self._company)

    @property
    def embedding(self) -> Tensor:
        """The embedding matrix."""
        weight: Tensor = self._model.get_input_embeddings().weight
        return weight

    @property
    def weights(self) -> list[Tensor]:
        """The model's tensors, a tied matrix once."""
        return list(self._model.parameters())

    def forward(self, plan: RowPlan, cache: KVCache, wanted: Tensor) -> Tensor:
        """Computes the rows of the plan, stores their keys and values, returns logits [len(wanted), V] float32."""
        num_rows, num_wanted = plan.num_rows, wanted.shape[0]
        num_padded = padded(num_rows, plan.token_ids.device)
        self._company.num_rows = num_rows
        with Products(self.ops, self._head, num_rows, num_padded, num_wanted), one_thread():
            output = self._model(
                input_ids=pad_index(plan.token_ids, num_padded)[None],
                position_ids=pad_index(plan.positions, num_padded)[None],
                use_cache=False,
                logits_to_keep=self._padded(wanted),
                outrider=Pages(plan, cache, self.ops),
            )
        logits: Tensor = output.logits[0, :num_wanted].float()
        return logits

    def _padded(self, wanted: Tensor) -> Tensor:
        """More rows of logits where the width of one leaves something over behind whole vectors."""
        whole = wanted.shape[0] and self.config.vocab_size % STEP == 0
        return wanted if whole else pad_index(wanted, padded(wanted.shape[0], wanted.device))
