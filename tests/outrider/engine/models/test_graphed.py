"""A forward in few kernels, and its recordings: bitwise what the model computes operation by operation."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest
import torch
from support.devices.graphs import Card, PretendGraph, pretend_card
from support.devices.kernels import CPU, KernelOps, altered, assert_same
from support.devices.story import tapped, tell
from support.models.engine_cases import TREE, close, finish, random_ids
from support.models.model_cases import PARTIAL
from support.models.tiny_models import write_tiny_model
from torch import Tensor

from outrider.engine.batching import Feed
from outrider.engine.models import graphed
from outrider.engine.models.config import ModelConfig
from outrider.engine.models.decoder import ChainDraws, Decoder
from outrider.engine.models.graphed import GraphedTransformer
from outrider.engine.models.transformer import Transformer
from outrider.engine.models.weights import load_tensors
from outrider.engine.ops import Ops
from outrider.engine.ops.reference import ReferenceOps
from outrider.engine.ops.triton import layers, linear
from outrider.engine.runner import ModelIdentity, ModelRunner
from outrider.model_service import row_costs
from outrider.token_tree import EMPTY, TokenTree

pytestmark = pytest.mark.early

BIASED = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 4}
SMALL = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
CHAIN = TokenTree.chain((7, 8, 9, 10))
CHECK_ROWS = GraphedTransformer.check_rows
# No token, and no fault.
UNMADE = -9
# How a recording computes, in the source.
COMPUTE = "def compute() -> Tensor:\n            return self._logits(self._compute(self._work"
FROZEN = f"work = self._work.clone()\n\n        {COMPUTE}".replace("compute(self._work", "compute(work")
RUNS = "            compute()\n        torch"
CURRENT = "torch.cuda.current_stream(self.embedding.device)"
WAITS = f"stream.wait_stream({CURRENT})\n        with"


class Tiled(Transformer):
    """Operation by operation, with the tiles of the few kernels."""

    tiles = (4, 8, 16)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little room, a cache of the weights' type as on a card, and units so short that there are several."""
    # Minutes in the interpreter; it has tests of its own.
    monkeypatch.setattr(GraphedTransformer, "check_rows", lambda _: None)
    monkeypatch.setattr(graphed, "WORK_NUMBERS", 1 << 13)
    monkeypatch.setattr(graphed, "PARTIAL_FLOATS", 1 << 15)
    monkeypatch.setattr(Decoder, "cache_dtype", property(lambda decoder: decoder.embedding.dtype))
    monkeypatch.setattr(linear, "UNITS", (32,))


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Card]:
    with pretend_card(monkeypatch) as found:
        yield found


@pytest.fixture
def graphs(card: Card) -> list[PretendGraph]:
    return card.graphs


def load(folder: Path, way: str, dtype: torch.dtype = torch.float32) -> ModelRunner:
    """The model by its operations, in few kernels, or in graphs."""
    config = ModelConfig.read(folder)
    ops: Ops = ReferenceOps() if way == "reference" else KernelOps(has_graphs=way == "graphs")
    kind = Tiled if way == "operations" else Transformer
    model = kind(config, load_tensors(folder, config, CPU, dtype)[0], ops)
    identity = ModelIdentity("tiny", "", str(dtype), 1, config.vocab_size)
    runner = ModelRunner(model, identity, 1024)
    if way == "operations":
        runner.model = model
    assert isinstance(runner.model, GraphedTransformer) == (way in {"kernels", "graphs"})
    for tensor in (*runner.cache.keys, *runner.cache.values):
        tensor.fill_(torch.nan)
    return runner


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model", "qwen3", vocab_size=100, num_hidden_layers=1, **SMALL)


def same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for pair in zip(found, expected, strict=True):
        assert_same(*pair)


def short(runner: ModelRunner) -> list[Tensor]:
    """A prompt beside another one's tree, a path of which is kept, and a step."""
    one, other = runner.open(random_ids(6, 1, 100), 6), runner.open(random_ids(5, 2, 100), 5)
    found = finish(runner, Feed(one), Feed(other, TREE))
    other.keep(TREE.path(7))
    one.extend([5])
    return [*found, *finish(runner, Feed(one, CHAIN), Feed(other))]


def check_family(folder: Path, dtype: torch.dtype, ways: Sequence[str] = ("kernels", "operations")) -> list[Tensor]:
    """Two ways give the same bits, which it returns."""
    found, expected = (short(load(folder, way, dtype)) for way in ways)
    same(found, expected)
    return found


BOUNDS = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 0.1}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": BIASED,
    "qwen2": {"num_key_value_heads": 1},
    "phi3": PARTIAL | {"sliding_window": None},
    # A window that hides nothing: the lists would do for the few kernels, and the layers' steps do not.
    "gemma3": {"sliding_window": 4096},
    "qwen3_moe": {"mlp_only_layers": []},
}
QUICK = [("llama", torch.float16), ("qwen3_moe", torch.float32)]
EVERY = [(family, dtype) for family in FAMILIES for dtype in BOUNDS]


def further(dtype: torch.dtype) -> pytest.MarkDecorator:
    """Who has time for what is not quick: of the type that most models have all families are in test-slow."""
    return pytest.mark.slow if dtype is torch.bfloat16 else pytest.mark.grid


@pytest.mark.parametrize(
    ("family", "dtype"),
    [pytest.param(*each, id=f"{each[0]} {each[1]}", marks=() if each in QUICK else further(each[1])) for each in EVERY],
)
def test_few_kernels_have_the_bits_of_the_operations(
    tmp_path: Path, family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms of heads, biases, tied embeddings and groups of one to four heads; near the reference too."""
    if dtype is not torch.float32:
        monkeypatch.setattr(linear, "UNITS", (128,))
    folder = write_tiny_model(tmp_path / "model", family, vocab_size=100, num_hidden_layers=1, **FAMILIES[family])
    found, exact = check_family(folder, dtype), short(load(folder, "reference", dtype))
    errors = [float((one - two).norm() / two.norm()) for one, two in zip(found, exact, strict=True)]
    assert max(errors) < BOUNDS[dtype]


@pytest.mark.grid
def test_every_kind_of_forward_has_the_bits_of_the_operations(tmp_path: Path, graphs: list[PretendGraph]) -> None:
    """Prompts in pieces, trees, forks, cuts, prefixes and growing trees; features at three boundaries too."""
    folder = write_tiny_model(tmp_path / "model", "qwen3", vocab_size=257)
    expected = tell(tapped(load(folder, "operations")))
    for way in ("kernels", "graphs"):
        same(tell(tapped(load(folder, way))), expected)
        assert bool(graphs) == (way == "graphs")


def test_recordings_serve_all_texts_of_their_size(
    folder: Path, graphs: list[PretendGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other lengths, sessions and trees, by turns with other sizes; a step of five rows fills one of six up."""
    monkeypatch.setattr(graphed, "GRAPH_ROWS", (2, 4, 6, 8))
    told: list[list[Tensor]] = []
    for way in ("graphs", "kernels"):
        runner = load(folder, way)
        runner.tap((0, 1))
        one, other = (runner.open(random_ids(length, length, 100), 1) for length in (2, 6))
        found = finish(runner, Feed(one)) + finish(runner, Feed(other))
        for each, tree in ((one, 4), (other, 3), (one, 3), (other, 4)):
            each.extend([tree])
            found += finish(runner, Feed(each, TokenTree.chain(range(tree))))
        found += finish(runner, Feed(one), Feed(other, TokenTree((1, 2, 3), (0, 0, 1))))
        told.append([*found, *(runner.cache.features[each.table.slots(0, each.cached_len)] for each in (one, other))])
    same(*told)
    # Of 2 rows, of 6 with those of 5, and of 4.
    assert [graph.num_replays for graph in graphs] == [1, 4, 2]
    assert all(graph.recorder.waits == [] for graph in graphs)


def random_feeds(runner: ModelRunner, num_rows: int, seed: int) -> list[Feed]:
    """New sessions with trees, one to three, of so many rows in all; prompts are among the rows."""
    chance = Random(seed)
    cuts = sorted(chance.sample(range(1, num_rows), min(chance.randint(0, 2), num_rows - 1)))
    feeds = []
    for begin, end in pairwise((0, *cuts, num_rows)):
        length = chance.randint(1, min(5, end - begin))
        parents = tuple(chance.randint(0, row) for row in range(end - begin - length))
        tokens = [chance.randrange(100) for _ in range(length + len(parents))]
        feeds.append(Feed(runner.open(tokens[:length], length), TokenTree(tuple(tokens[length:]), parents)))
    return feeds


def check_sizes(folder: Path, sizes: Sequence[int]) -> None:
    """Each size is recorded with all its rows, and then replayed with the fewest that it serves, in another order."""
    fewest = [before + 1 for before, size in pairwise((0, *graphed.GRAPH_ROWS)) if size in sizes]
    turns = [*sizes, *Random(1).sample(fewest, len(fewest))]
    recorded, direct = (load(folder, way) for way in ("graphs", "kernels"))
    for seed, num_rows in enumerate(turns):
        found = []
        for runner in (recorded, direct):
            feeds = random_feeds(runner, num_rows, seed)
            found.append(finish(runner, *feeds))
            close(runner, *(feed.session for feed in feeds))
        same(*found)
    # What fills a size up is stored nowhere.
    for stored, expected in zip(recorded.cache.keys, direct.cache.keys, strict=True):
        assert torch.equal(stored.nan_to_num(), expected.nan_to_num())


@pytest.mark.grid
def test_recordings_of_every_size_have_the_bits_of_launches(folder: Path, graphs: list[PretendGraph]) -> None:
    """All that a card records, each full and as empty as it may be, in random order."""
    check_sizes(folder, graphed.GRAPH_ROWS)
    assert [graph.num_replays for graph in graphs] == [2] * len(graphed.GRAPH_ROWS)


def check_replaced(folder: Path) -> None:
    """Steps of one size before and after: features that a cache keeps from now on, and an embedding that has grown."""
    found: list[list[Tensor]] = []
    for way in ("graphs", "kernels"):
        runner = load(folder, way)
        assert isinstance(runner.model, GraphedTransformer)
        session = runner.open([3, 4, 5], 3)
        step = Feed(session, TokenTree.chain((7, 8)))
        told = finish(runner, Feed(session))
        runner.cache.keep_features(2 * 48, (0, 1))
        told += finish(runner, step)
        told.append(runner.cache.features[session.table.slots(2, 5)].clone())
        runner.model.embed_more(torch.zeros(2, 48))
        runner.model.embedding.mul_(0.5)
        found.append([*told, *finish(runner, step)])
    same(*found)


def test_what_is_replaced_ends_recordings(folder: Path, graphs: list[PretendGraph]) -> None:
    """Each of them once."""
    check_replaced(folder)
    assert len(graphs) == 3


@pytest.mark.slow
def test_what_a_recording_has_no_room_for_is_launched(
    folder: Path, graphs: list[PretendGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work that is too long, and chunks that are too many."""
    expected = short(load(folder, "kernels"))
    monkeypatch.setattr(graphed, "WORK_NUMBERS", 20)
    same(short(load(folder, "graphs")), expected)
    monkeypatch.setattr(graphed, "WORK_NUMBERS", 1 << 13)
    monkeypatch.setattr(graphed, "PARTIAL_FLOATS", 1)
    same(short(load(folder, "graphs")), expected)
    assert graphs == []


@pytest.mark.slow
def test_a_frozen_number_is_found(folder: Path, graphs: list[PretendGraph], monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: attention's work goes through the host, and so a recording has that of its first step."""
    attend = KernelOps.attend_together

    def frozen(ops: KernelOps, query: Tensor, work: Tensor, *others: object) -> None:
        attend(ops, query, torch.tensor(work.tolist(), dtype=work.dtype), *others)  # type: ignore[arg-type]

    monkeypatch.setattr(KernelOps, "attend_together", frozen)
    runner, direct = load(folder, "graphs"), load(folder, "kernels")

    def step(length: int) -> None:
        feeds = [(each, Feed(each.open(random_ids(length, 1, 100), 1))) for each in (runner, direct)]
        for each, feed in feeds:
            finish(each, feed)
        same(*(finish(each, feed) for each, feed in feeds))

    step(3)
    with pytest.raises(AssertionError):
        step(5)


def check_few(folder: Path) -> None:
    """Of one size, full and filled up."""
    check_sizes(folder, (8,))


@pytest.mark.slow
@pytest.mark.usefixtures("card")
@pytest.mark.parametrize(
    ("method", "old", "new", "check", "words"),
    [
        ("forward", " or cache.features is not self._features", "", check_replaced, ""),
        ("embed_more", "self._graphs.clear()", "pass", check_replaced, ""),
        ("_record", COMPUTE, FROZEN, check_few, ""),
        ("_record", RUNS, RUNS.replace("compute()", "pass"), check_few, "is compiled while"),
        ("_record", WAITS, "with", check_few, "side by side"),
        ("_record", f"{CURRENT}.wait_stream(stream)", "pass", check_few, "side by side"),
    ],
    ids=["features", "embedding", "inputs", "not run before", "begins too early", "is not awaited"],
)
def test_planted_faults_are_found(
    folder: Path,
    tmp_path: Path,
    method: str,
    old: str,
    new: str,
    check: Callable[[Path], None],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stale memory, frozen inputs, what is compiled while it is recorded, and streams that run side by side."""
    changed = altered(graphed, old, new, tmp_path)
    monkeypatch.setattr(GraphedTransformer, method, getattr(changed.GraphedTransformer, method))
    with pytest.raises(RuntimeError if words else AssertionError, match=words or None):
        check(folder)


@pytest.mark.slow
@pytest.mark.usefixtures("card")
def test_rows_that_fill_up_and_are_stored_are_found(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: all rows of a size have keys and values."""
    old, new = "if row < tl.load(work + NUM_ROWS):\n        column", "if row < num_rows:\n        column"
    monkeypatch.setattr(graphed, "layers", altered(layers, old, new, tmp_path))
    with pytest.raises(AssertionError):
        check_few(folder)


def chained(runner: ModelRunner, lengths: Sequence[int], depth: int, *, one_by_one: bool) -> list[Tensor]:
    """Ids [depth, W] that are drawn after texts of these lengths, hot and not, in one call or one by one.

    Then keys and values of the texts and of what was drawn.
    """
    num_texts = len(lengths)
    sessions = [runner.open(random_ids(length, length, 100), length) for length in lengths]
    for session in sessions:
        session.reserve()
        slots = session.table.slots(0, len(session) - 1)
        for seed, cache in enumerate((*runner.cache.keys, *runner.cache.values)):
            cache[slots] = torch.randn(cache[slots].shape, generator=torch.Generator().manual_seed(seed))
        # What is read of a long text takes the interpreter minutes.
        session.advance(len(session) - 1, EMPTY)
    temperatures = torch.arange(num_texts).double() / 2
    keys = torch.arange(100, 100 + depth * num_texts).view(depth, num_texts)
    found = torch.full_like(keys, UNMADE)

    if one_by_one:
        for step in range(depth):
            logits = runner.forward([Feed(each) for each in sessions]).logits
            found[step] = runner.ops.choose(logits, temperatures, keys[step], 100)
            for session, token_id in zip(sessions, found[step].tolist(), strict=True):
                session.extend([token_id])
    else:
        for step, ids in enumerate(row_costs.make_chain(runner, sessions, ChainDraws(temperatures, keys, 100))):
            found[step] = torch.tensor(ids)
    slots = [session.table.slots(0, length + depth - 1) for session, length in zip(sessions, lengths, strict=True)]
    caches = (*runner.cache.keys, *runner.cache.values)
    stored = [cache[own].nan_to_num() for own in slots for cache in caches]
    for session in sessions:
        session.free()
    return [found, *stored]


@pytest.mark.parametrize("way", ["graphs", "kernels"])
def test_chains_are_those_of_single_steps(
    tmp_path: Path, way: str, graphs: list[PretendGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a chunk and over its edge, alone and among rows that fill a size up; recordings are those of any step."""
    monkeypatch.setattr(graphed, "GRAPH_ROWS", (1, 4))
    sizes = {"vocab_size": 100, "num_hidden_layers": 1, "context_len": 300}
    folder = write_tiny_model(tmp_path / "model", "qwen3", **sizes, **SMALL)
    direct, runner = load(folder, "kernels"), load(folder, way)
    for lengths, depth in (((3, 254, 9), 4), ((255,), 2)):
        expected = chained(direct, lengths, depth, one_by_one=True)
        same(chained(runner, lengths, depth, one_by_one=False), expected)
    assert [graph.num_replays for graph in graphs] == ([4, 2] if way == "graphs" else [])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tl.store(position, tl.load(position) + by)", "pass"),
        ("tl.load(place) + by", "tl.load(place)"),
        ("tl.load(keys + count - 1)", "tl.load(keys + count - 2)"),
        ("tl.load(ids + row)", "tl.load(ids)"),
    ],
    ids=["a position", "a count", "a slot", "a token"],
)
def test_a_slip_on_the_way_down_is_found(
    folder: Path, tmp_path: Path, old: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted, each alone."""
    expected = chained(load(folder, "kernels"), (3, 9), 3, one_by_one=True)
    runner = load(folder, "kernels")
    monkeypatch.setattr(graphed, "layers", altered(layers, old, new, tmp_path))
    with pytest.raises(AssertionError):
        same(chained(runner, (3, 9), 3, one_by_one=False), expected)


def test_a_chain_ends_before_what_cannot_be_drawn(folder: Path) -> None:
    """A row without numbers ends the steps of all; before the first there are none."""
    runner = load(folder, "kernels")
    ids, *_ = chained(runner, (3, 9), 3, one_by_one=True)
    broken = load(folder, "kernels")
    assert isinstance(broken.model.embedding, Tensor)
    broken.model.embedding[ids[1, 1]] = torch.nan
    found, *_ = chained(broken, (3, 9), 4, one_by_one=False)
    assert found.tolist() == [*ids[:2].tolist(), *[[UNMADE] * 2] * 2]


def check_warm(folder: Path, card: Card) -> None:
    """A prompt in pieces, trees, steps, choices and chains need no kernel that the warm-up did not have."""
    runner = load(folder, "graphs")
    runner.max_rows = 12
    row_costs.warm_up(runner)
    known = set(card.compiled)
    for logits in short(runner):
        rows = torch.zeros(len(logits))
        runner.ops.choose(logits, rows.double(), rows.long(), 100)
    chained(runner, (3, 9), 3, one_by_one=False)
    assert known
    assert card.compiled == known


@pytest.mark.slow
def test_after_the_warm_up_nothing_is_compiled(folder: Path, card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sizes that are recorded, and of larger ones."""
    monkeypatch.setattr(graphed, "GRAPH_ROWS", (4, 8))
    check_warm(folder, card)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        # A constant that follows the number of rows.
        (graphed, "BLOCK=1024", "BLOCK=1024 << num_rows % 2"),
        # Chains, and their draws, are not among what is made before.
        (row_costs, "isinstance(model, ChainingDecoder)", "False"),
    ],
    ids=["a constant", "a chain"],
)
def test_a_kernel_of_later_is_found(
    folder: Path, tmp_path: Path, card: Card, module: ModuleType, old: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: a server would compile it in the middle of its answers."""
    monkeypatch.setattr(graphed, "GRAPH_ROWS", (4, 8))
    changed = altered(module, old, new, tmp_path)
    if module is graphed:
        monkeypatch.setattr(GraphedTransformer, "_compute", changed.GraphedTransformer._compute)
    else:
        monkeypatch.setattr(row_costs, "warm_up", changed.warm_up)
    with pytest.raises(AssertionError):
        check_warm(folder, card)


@pytest.mark.slow
def test_windows_and_parts_of_a_model_go_by_its_operations(tmp_path: Path) -> None:
    """Lists that begin elsewhere share no work; a part of the layers is the model's own."""
    folder = write_tiny_model(
        tmp_path / "model", "mistral", vocab_size=100, num_hidden_layers=2, sliding_window=4, num_key_value_heads=1
    )
    runner, direct = load(folder, "kernels"), load(folder, "reference")
    assert runner.model.tiles == ()
    for found, exact in zip(short(runner), short(direct), strict=True):
        assert float((found - exact).norm() / exact.norm()) < 1e-5


@pytest.mark.parametrize("differing", [["head"], []])
def test_of_rows_that_differ_nothing_is_promised(
    folder: Path, differing: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their numerics have another name, so that no text is expected to be equal elsewhere."""
    runner = load(folder, "kernels")
    monkeypatch.setattr(graphed, "differing_operations", lambda model, tiles: differing)
    assert isinstance(runner.model, GraphedTransformer)
    CHECK_ROWS(runner.model)
    assert runner.is_row_invariant is not bool(differing)
    assert runner.numerics_id == f"cpu-torch.float32-{runner.ops.name}{'-variant' if differing else ''}"
