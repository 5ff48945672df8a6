"""The pair of models of a simulated world: a forward takes a fifth of a millisecond. Written and loaded once a session.

The draft is the target with noise on its weights, so that it is right about every second token.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file, save_file
from support.models.tiny_models import write_tiny_model

from gateway.text.tokenizer import Tokenizer
from outrider.engine.batching import Feed
from outrider.engine.models.config import ModelConfig
from outrider.engine.models.transformer import Transformer
from outrider.engine.models.weights import load_tensors, model_hash
from outrider.engine.ops import choose_ops
from outrider.engine.runner import ModelIdentity, ModelRunner
from outrider.engine.sampling.draw import DrawInput, forward_and_draw
from outrider.model_files.vocabulary import Vocabulary
from outrider.parameters import SamplingParameters, SessionSpec

CONTEXT_LEN = 64
SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
PROMPTS = ((5, 17, 3), (9,), (30, 2, 8, 8, 21, 11, 4, 36, 19, 1, 7, 13, 25, 6, 39, 14, 22), (12, 12, 33, 10, 28))
EOS_TOKEN_IDS = frozenset({0})
SEED = 8
NOISE = 0.08


@dataclass(frozen=True, slots=True)
class Weights:
    """What all incarnations of a service share."""

    transformer: Transformer
    identity: ModelIdentity
    vocabulary: Vocabulary

    def runner(self, kv_tokens: int) -> ModelRunner:
        """The model with a cache of its own."""
        return ModelRunner(self.transformer, self.identity, kv_tokens)


@dataclass(frozen=True, slots=True)
class Models:
    """Both models and the tokenizer, which is the target's."""

    target: Weights
    draft: Weights
    tokenizer: Tokenizer


@cache
def models() -> Models:
    """Writes both models to a temporary folder and loads them."""
    with TemporaryDirectory(prefix="outrider-simulation-") as folder:
        target = write_tiny_model(Path(folder, "target"), "llama", seed=SEED, context_len=CONTEXT_LEN, **SIZES)
        draft = write_tiny_model(Path(folder, "draft"), "llama", seed=SEED, context_len=CONTEXT_LEN, **SIZES)
        _add_noise(draft / "model.safetensors")
        return Models(_load(target), _load(draft), Tokenizer(str(target)))


def _add_noise(weights: Path) -> None:
    dice = torch.Generator().manual_seed(SEED)
    tensors = load_file(weights)
    save_file({name: each + NOISE * torch.randn(each.shape, generator=dice) for name, each in tensors.items()}, weights)


def _load(folder: Path) -> Weights:
    config, vocabulary, device = ModelConfig.read(folder), Vocabulary.read(folder), torch.device("cpu")
    tensors = load_tensors(folder, config, device, torch.float32)[0]
    transformer = Transformer(config, tensors, choose_ops(device, 1))
    identity = ModelIdentity(folder.name, model_hash(folder), "float32", 1, vocabulary.size)
    return Weights(transformer, identity, vocabulary)


@dataclass(frozen=True, slots=True)
class Asked:
    """What decides about the tokens of a request; prompt is an index of PROMPTS."""

    prompt: int = 0
    temperature: float = 0.0
    penalty: float = 0.0
    seed: int = 1
    max_tokens: int = 16

    def spec(self) -> SessionSpec:
        """Spec of the request, as the gateway completes it."""
        prompt = PROMPTS[self.prompt]
        return SessionSpec(
            token_ids=prompt,
            prompt_len=len(prompt),
            sampling=SamplingParameters(temperature=self.temperature, frequency_penalty=self.penalty),
            seed=self.seed,
            max_len=len(prompt) + self.max_tokens,
            eos_token_ids=EOS_TOKEN_IDS,
            stop_token_ids=frozenset(),
        )


@cache
def plain_decoding(asked: Asked) -> tuple[int, ...]:
    """What the target says, from one forward a token and nothing else."""
    spec, runner = asked.spec(), models().target.runner(CONTEXT_LEN)
    session = runner.open(spec.token_ids, spec.prompt_len)
    said: list[int] = []
    while len(said) < asked.max_tokens and not EOS_TOKEN_IDS & set(said[-1:]):
        session.reserve(0)
        [drawn] = forward_and_draw(runner, [DrawInput(Feed(session), spec)])
        if not isinstance(drawn, list):
            raise AssertionError(f"no token could be drawn: {drawn}")
        session.extend(drawn)
        said += drawn
    return tuple(said)
