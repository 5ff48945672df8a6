"""A search by the pure functions says what transformers' beam search says, in sequences, order and scores."""

from collections.abc import Sequence
from functools import partial

import pytest
import torch
import transformers
from support.basics import grid
from support.rounding import reach
from torch import Tensor

from gateway.beams.record import BeamRecord
from outrider.beams import BeamSearch, BeamStep, Candidate, EarlyStopping, LiveBeam
from outrider.engine.sampling.beams import select
from outrider.errors import ProtocolViolation
from outrider.parameters import FinishReason, SamplingParameters, SessionSpec

VOCABULARY_SIZE = 48
# Often enough that sequences of all lengths end.
ENDS = (3, 11, 17)
MAX_TOKENS, PAD = 14, 1
STOPPING: dict[EarlyStopping, bool | str] = {"heuristic": False, "first": True, "never": "never"}


@pytest.fixture(scope="module")
def model() -> transformers.PreTrainedModel:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        initializer_range=0.4,
    )
    torch.manual_seed(7)
    return transformers.LlamaForCausalLM(config).eval()


def spec_of(prompt: Sequence[int], max_tokens: int = MAX_TOKENS) -> SessionSpec:
    """A request that ends with any of two EOS tokens or a stop token."""
    return SessionSpec(
        token_ids=tuple(prompt),
        prompt_len=len(prompt),
        sampling=SamplingParameters(),
        seed=0,
        max_len=len(prompt) + max_tokens,
        eos_token_ids=frozenset(ENDS[:2]),
        stop_token_ids=frozenset(ENDS[2:]),
    )


@torch.no_grad()
def logprobs(model: transformers.PreTrainedModel, sequences: Tensor) -> Tensor:
    """Log-probabilities [sequences, positions, V]."""
    return torch.log_softmax(model(sequences).logits, dim=-1)


def searched(model: transformers.PreTrainedModel, prompt: Sequence[int], search: BeamSearch) -> BeamRecord:
    """The record of a search that computes every step from whole sequences."""
    record = BeamRecord(spec_of(prompt), search)
    while record.finish_reason is None:
        live = record.live or (LiveBeam((), 0.0),)
        sequences = torch.tensor([[*prompt, *beam.token_ids] for beam in live])
        is_last = len(record) + 1 == len(prompt) + MAX_TOKENS
        last = logprobs(model, sequences)[:, -1]
        record.take([select(last, [beam.score for beam in live], search.width, frozenset(ENDS), is_last=is_last)])
    return record


@pytest.mark.slow
@pytest.mark.parametrize("early_stopping", STOPPING)
@pytest.mark.parametrize("length_penalty", [-0.7, 0.0, 1.0, 2.0])
@pytest.mark.parametrize("width", [*grid(2), 4, *grid(8)])
def test_a_search_says_what_transformers_says(
    model: transformers.PreTrainedModel, width: int, length_penalty: float, early_stopping: EarlyStopping
) -> None:
    lengths = set()
    for seed in range(5):
        prompt = torch.randint(VOCABULARY_SIZE, (4,), generator=torch.Generator().manual_seed(seed)).tolist()
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            num_beams=width,
            num_return_sequences=width,
            do_sample=False,
            max_new_tokens=MAX_TOKENS,
            length_penalty=length_penalty,
            early_stopping=STOPPING[early_stopping],
            eos_token_id=list(ENDS),
            pad_token_id=PAD,
            return_dict_in_generate=True,
            output_scores=True,
        )
        # A score is a sum of so many log-probabilities.
        limit = reach(model.parameters(), partial(logprobs, model, output.sequences))
        finished = searched(model, prompt, BeamSearch(width, length_penalty, early_stopping)).finished
        for hypothesis, row, score in zip(finished, output.sequences, output.sequences_scores, strict=True):
            said = row[len(prompt) :].tolist()
            assert list(hypothesis.token_ids) == said[: len(hypothesis.token_ids)]
            assert set(said[len(hypothesis.token_ids) :]) <= {PAD}
            length = len(hypothesis.token_ids)
            assert hypothesis.score == pytest.approx(float(score), rel=0, abs=limit * length / length**length_penalty)
            lengths.add(length)
    assert length_penalty > 0 or len(lengths) > 1


def test_every_sequence_ends_at_the_limit() -> None:
    record = BeamRecord(spec_of([5], max_tokens=1), BeamSearch(2))
    record.take([BeamStep((), (Candidate(0, 7, -1.0), Candidate(0, 3, -2.0)))])
    assert [each.finish_reason for each in record.finished] == [FinishReason.LENGTH, FinishReason.EOS]
    assert record.finish_reason is FinishReason.LENGTH


def test_steps_behind_the_end_of_a_search_are_nobody_s() -> None:
    record = BeamRecord(spec_of([5]), BeamSearch(2, early_stopping="first"))
    ended = (Candidate(0, 3, -1.0), Candidate(0, 11, -1.5))
    record.take([BeamStep((Candidate(0, 7, -2.0),), ended), BeamStep((Candidate(0, 8, -2.5),))])
    assert len(record) == 2
    assert [each.token_ids for each in record.finished] == [(3,), (11,)]


@pytest.mark.parametrize(
    "steps",
    [
        [],
        [BeamStep((Candidate(1, 7, -1.0),))],
        [BeamStep(tuple(Candidate(0, token_id, -1.0) for token_id in range(20, 23)))],
        [BeamStep((), (Candidate(0, 7, -1.0),))],
    ],
    ids=["none", "a beam that there is not", "too many beams", "an end that is none"],
)
def test_a_step_that_cannot_be_is_refused(steps: list[BeamStep]) -> None:
    with pytest.raises(ProtocolViolation):
        BeamRecord(spec_of([5]), BeamSearch(2)).take(steps)
