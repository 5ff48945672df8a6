"""Kangaroo's adapter against numpy, from its file to the guesses on top of a target's lower layers."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support.basics import check_empty, spec_of
from support.heads.head_oracle import read_tensors
from support.heads.kangaroo import kangaroo_logits, write_kangaroo
from support.heads.tiny_heads import change, load_file, tiny_target
from support.models.engine_cases import every_ops, random_ids
from support.models.layers import NUM_LAYERS, count_rows, write_layered_model
from support.models.model_cases import reference
from support.rounding import reach
from support.services.stepped_target import (
    PROMPT,
    VOCABULARY_SIZE,
    OwnTarget,
    Target,
    assert_like_fresh,
    check_pure,
    plain,
)

from outrider.drafters.drafter import Drafter, GuessLimits
from outrider.drafters.hosted import FeatureCopy
from outrider.drafters.shelf.early_exit import Kangaroo
from outrider.engine.batching import Feed
from outrider.engine.cache import BlockTable
from outrider.engine.heads.checkpoint import read_head
from outrider.engine.heads.fused import head_decoder
from outrider.engine.ops import Ops
from outrider.engine.runner import ModelIdentity, ModelRunner
from outrider.engine.session import Session
from outrider.errors import ModelRefused
from outrider.parameters import SessionSpec
from target_service.server import TargetSettings, start

CPU = torch.device("cpu")
SPEC = spec_of(PROMPT, 60, seed=3, eos=(), temperature=1.0)
GREEDY = spec_of(PROMPT, 60, seed=3, eos=())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_layered_model(tmp_path_factory.mktemp("layers") / "model")


@pytest.fixture
def adapter(folder: Path, tmp_path: Path) -> Path:
    """One that is often right: its norm is the model's last one."""
    head, norm = write_kangaroo(tmp_path / "adapter", VOCABULARY_SIZE), load_file(folder / "model.safetensors")
    return change(head, tensors={"norm.weight": norm["model.norm.weight"]})


@pytest.fixture
def target(folder: Path) -> Iterator[ModelRunner]:
    runner = ModelRunner.load(str(folder), dtype="float32", kv_tokens=4096)
    yield runner
    check_empty(runner.pool)


def host(target: ModelRunner, adapter: Path) -> Drafter:
    found = read_head(adapter, target.parts)
    return Kangaroo(target, *found.load(target.parts, CPU, torch.float32, target.ops))


@pytest.mark.parametrize("max_rows", [512, 3])
@pytest.mark.parametrize("ops", every_ops(), ids=lambda ops: ops.name)
def test_logits_are_those_of_numpy(tmp_path: Path, ops: Ops, max_rows: int) -> None:
    """Of every row, the first one too, whose states are its own token's; in pieces or at once."""
    parts, token_ids = tiny_target(), random_ids(23, vocab_size=90)
    folder = write_kangaroo(tmp_path / "adapter", parts.vocab_size, exit_layer=3)
    head = read_head(folder, parts).load(parts, CPU, torch.float32, ops)[0]
    assert head.facts.taps == (3,)
    states = torch.randn(len(token_ids), parts.hidden_size, generator=torch.Generator().manual_seed(5))
    runner = ModelRunner(head_decoder(head, parts, ops), ModelIdentity("any", "0", "any", 1, 90), 64, max_rows)
    runner.cache.keep_features(parts.hidden_size + 1)
    session = runner.open(token_ids, 1)
    session.reserve()
    runner.cache.features[session.table.slots(0, len(token_ids))] = torch.cat((states, torch.zeros(23, 1)), 1)
    logits, done = [], False
    while not done:
        result = runner.forward([Feed(session, wants_prefix=True)])
        logits.append(result.logits)
        done = result.ranges[0] is not None
    tensors, output = read_tensors(folder), parts.output.double().numpy()

    def expected() -> torch.Tensor:
        return torch.from_numpy(kangaroo_logits(folder, tensors, output, states.double().numpy()))

    assert (torch.cat(logits) - expected()).abs().max() < reach([*tensors.values(), output], expected)


def check_guesses(folder: Path, target: ModelRunner, adapter: Path, prompt_len: int) -> None:
    """Asserts that after every guess the next is the best of numpy's logits on transformers' states."""
    model, output = reference(folder), target.parts.output.double().numpy()
    spec = spec_of(random_ids(prompt_len, vocab_size=VOCABULARY_SIZE), prompt_len + 40, eos=())
    own = OwnTarget(target, host(target, adapter))
    answers, said = own.to_the_end(spec, 4), list(own.tokens)
    own.table.clear()
    drafted = [(answer.fence.base_len, answer.content.hosted.tree.token_ids) for answer in answers[1:]]
    for base_len, guesses in drafted:
        text = [*said[:base_len], *guesses]
        with torch.no_grad():
            states = model(torch.tensor([text]), output_hidden_states=True).hidden_states[2][0]
        logits = kangaroo_logits(adapter, read_tensors(adapter), output, states.double().numpy())
        assert tuple(logits[base_len - 1 : -1].argmax(1).tolist()) == guesses
    assert sum(len(guesses) for _, guesses in drafted) > 40
    assert sum(len(answer.content.accepted_rows) for answer in answers) > 10


@pytest.mark.slow
@pytest.mark.parametrize("prompt_len", [5, 200])
def test_guesses_are_those_of_the_published_law(
    folder: Path, target: ModelRunner, adapter: Path, prompt_len: int
) -> None:
    """From the files alone, also after guesses that were right and are committed now."""
    check_guesses(folder, target, adapter, prompt_len)


@pytest.mark.parametrize("count", [1, 8, 16])
def test_guesses_that_nobody_waits_for_any_longer_leave_the_target_alone(
    target: ModelRunner, adapter: Path, count: int
) -> None:
    """A step that wants none comes while the adapter still reads; it must not guess into what is committed then."""
    prompt = tuple(random_ids(60, vocab_size=VOCABULARY_SIZE))
    spec = spec_of(prompt, 160, eos=())
    hosting = host(target, adapter)
    assert hosting.runner is not None
    hosting.runner.max_rows = 20
    own = OwnTarget(target, hosting)
    own.ask(spec, 0)
    own.run()
    own.sessions.acknowledge(own.fence(1, len(own.tokens)), 40, 0, own.answers, GuessLimits(count))
    own.device.step(own.verifier.advance)
    own.go_on(0, 40)
    own.run()
    while own.held.finish_reason is None:
        own.go_on(0, 40)
        own.run()
    said = list(own.tokens)
    own.table.clear()
    alone = Target(target, prefix_cache=False)
    alone.open(spec, budget=200)
    alone.run()
    while alone.held.finish_reason is None:
        alone.step(1, len(alone.tokens), budget=200)
        alone.run()
    assert said == alone.tokens
    alone.table.clear()


@pytest.mark.parametrize("spec", [GREEDY, SPEC], ids=["greedy", "sampled"])
@pytest.mark.parametrize("budget", [0, 40])
def test_tokens_are_those_of_plain_decoding(
    target: ModelRunner, adapter: Path, monkeypatch: pytest.MonkeyPatch, spec: SessionSpec, budget: int
) -> None:
    """What is cached is a fresh session's, and every layer of the target has computed each row once."""
    own = OwnTarget(target, host(target, adapter))
    tokens = plain(target, spec)
    counts = count_rows(target, monkeypatch)
    answers = own.to_the_end(spec, 4, budget)
    assert own.tokens == tokens
    num_rows = len(PROMPT) + sum(len(answer.content.hosted.tree) + 1 for answer in answers[1:])
    assert counts == dict.fromkeys(range(NUM_LAYERS), num_rows)
    assert num_rows > 100
    monkeypatch.undo()
    assert_like_fresh(own)
    own.table.clear()


def long_prompt(target: ModelRunner, hosting: Drafter) -> tuple[OwnTarget, SessionSpec, list[int]]:
    """A session whose adapter has a long prompt to read, three rows at a time, before its next guess."""
    spec = spec_of(random_ids(60, vocab_size=VOCABULARY_SIZE), 90, eos=())
    own = OwnTarget(target, hosting)
    own.ask(spec, 0)
    own.run()
    assert hosting.runner is not None
    hosting.runner.max_rows = 3
    own.go_on(4)
    own.device.step(own.verifier.advance)
    assert own.held.hosted is not None
    assert own.held.hosted.part.is_reading
    return own, spec, own.tokens[:60]


def test_an_adapter_reads_a_long_text_in_steps(target: ModelRunner, adapter: Path) -> None:
    """And guesses what it guesses in one step."""
    hosting = host(target, adapter)
    own, spec, _ = long_prompt(target, hosting)
    [answer] = own.run()
    assert len(answer.content.hosted.tree) == 4
    check_pure(target, hosting, spec, [(own.tokens[:61], answer.content.hosted.tree)])
    own.table.clear()


def test_a_target_that_loses_its_cache_meanwhile_has_no_guesses(target: ModelRunner, adapter: Path) -> None:
    """Its blocks are somebody else's when the adapter has read; the round is plain, and the next one is not."""
    own, _, _ = long_prompt(target, host(target, adapter))
    own.held.session.free()
    thief = target.open(list(range(100, 200)), 1)
    target.forward([Feed(thief)])
    [answer] = own.run()
    assert not answer.content.hosted.tree
    own.go_on(4)
    [answer] = own.run()
    assert len(answer.content.hosted.tree) == 4
    assert_like_fresh(own)
    thief.free()
    own.table.clear()


def test_no_room_costs_guesses_and_nothing_else(target: ModelRunner, adapter: Path) -> None:
    """Whether the target has none for guesses or the adapter none for tokens."""
    hosting = host(target, adapter)
    tokens = plain(target, GREEDY)
    assert hosting.runner is not None
    for runner in (hosting.runner, target):
        own = OwnTarget(target, hosting)
        own.ask(GREEDY, 4)
        own.run()
        hog = BlockTable(runner.pool, runner.cache)
        # Tokens have one block, and guesses would need another.
        hog.reserve((runner.pool.num_free - (1 if runner is hosting.runner else 0)) * runner.pool.block_size)
        drafted = []
        while len(own.tokens) < 16:
            own.go_on(12)
            drafted += [len(answer.content.hosted.tree) for answer in own.run()]
        assert drafted == [0] * len(drafted)
        hog.free()
        while own.held.finish_reason is None:
            own.go_on(4)
            drafted += [len(answer.content.hosted.tree) for answer in own.run()]
        assert own.tokens == tokens
        assert max(drafted) == 4
        own.table.clear()
        check_empty(hosting.runner.pool)


def _read_the_token_before(patch: pytest.MonkeyPatch) -> None:
    def copy(self: FeatureCopy, source: Session, session: Session, start: int, end: int) -> None:
        for position in range(max(start, 1), end):
            real(self, source, session, position, position + 1)
            slots = session.table.slots(position - 1, position + 1)
            session.table.cache.copy(slots[1:], slots[:1])

    real = FeatureCopy.__call__
    patch.setattr(FeatureCopy, "__call__", copy)


def _leave_guesses_without_a_state(patch: pytest.MonkeyPatch) -> None:
    def copy(self: FeatureCopy, source: Session, session: Session, start: int, end: int) -> None:
        if end - start > 1 or end < len(session):
            real(self, source, session, start, end)

    real = FeatureCopy.__call__
    patch.setattr(FeatureCopy, "__call__", copy)


@pytest.mark.parametrize("plant", [_read_the_token_before, _leave_guesses_without_a_state])
def test_a_fault_would_be_seen(
    folder: Path,
    target: ModelRunner,
    adapter: Path,
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None],
) -> None:
    """Other guesses than the published formula's."""
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check_guesses(folder, target, adapter, 5)


def test_an_adapter_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    """With one sentence, and before anything is read."""
    parts = tiny_target(num_layers=3)
    layer = "layers.0."

    def refusal(name: str, tensors: dict[str, torch.Tensor | None] | None = None, **config: object) -> str:
        folder = change(write_kangaroo(tmp_path / name, parts.vocab_size), config=config, tensors=tensors)
        with pytest.raises(ModelRefused) as caught:
            read_head(folder, parts)
        return caught.value.message

    assert refusal("deep", exit_layer=3).endswith('"exit_layer" is 3, but the target has 3 layers')
    assert '"exit_layer" is 0, but must be an integer of at least 1' in refusal("none", exit_layer=0)
    assert refusal("normless", {"norm.weight": None}).endswith("lacks the tensor norm.weight")
    assert refusal("keyless", {f"{layer}self_attn.k_proj.weight": None}).endswith("k_proj.weight")
    assert "[5, 48]" in refusal("misshapen", {f"{layer}self_attn.o_proj.weight": torch.zeros(5, 48)})
    assert "the target has 90" in refusal("other", vocab_size=91)
    found = read_head(write_kangaroo(tmp_path / "head", parts.vocab_size), parts)
    assert found.taps == (2,)
    assert "exit_layer: 2 (default)" in found.notes


async def test_an_adapter_is_a_head_of_the_service(folder: Path, adapter: Path) -> None:
    """Its drafter has its name, and weights of its own alone, of four bits and their scales."""
    settings = TargetSettings(
        str(folder), listen="127.0.0.1:0", threads=1, kv_tokens=640, head=str(adapter), exit_layer=1
    )
    running = await start(settings)
    try:
        assert list(running.facts.drafters) == ["layer_skip", "kangaroo"]
        offer = running.facts.offer("kangaroo")
        num_weights, norm_bytes = (2 * 64 + 2 * 32) * 48, 4 * 96
        assert offer.model_name == "kangaroo"
        assert num_weights / 2 < offer.weight_bytes - norm_bytes < num_weights
    finally:
        await running.stop(0)
