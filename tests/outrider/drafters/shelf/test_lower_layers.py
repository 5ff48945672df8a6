"""A model some layers at a time: whatever is computed when, every bit is that of a whole forward."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support.models.engine_cases import TREE, close, finish, kv_state, random_ids
from support.models.layers import count_rows
from support.models.tiny_models import write_tiny_model
from torch import Tensor

from outrider.drafters.shelf.lower_layers import NO_ROWS, BegunRows, lower_runner, session_ahead
from outrider.engine.batching import Feed
from outrider.engine.runner import ModelRunner
from outrider.engine.session import Session
from outrider.errors import CacheFull, ModelRefused
from outrider.token_tree import EMPTY, TokenTree

pytestmark = pytest.mark.slow

NUM_LAYERS = 4
PROMPT = random_ids(40, vocab_size=300)
GUESSES = (7, 8, 9, 10)
CHAIN = TokenTree.chain(GUESSES)


@dataclass
class Model:
    """A model, and its lower layers by their number."""

    runner: ModelRunner
    lower: dict[int, ModelRunner]

    def read(self, token_ids: Sequence[int] = PROMPT) -> Session:
        """A session of which all but the last token is cached."""
        session = self.runner.open(token_ids, len(token_ids), b"salt")
        self.runner.forward([Feed(session, without_last=True)])
        return session

    def guess(self, session: Session, boundary: int, guesses: Sequence[int] = GUESSES) -> None:
        """Computes lower layers of the last token and of all guesses but one, row after row, as a drafter does."""
        own = session_ahead(session, len(guesses))
        for guess in guesses:
            self.lower[boundary].forward([Feed(own)])
            own.extend([guess])
        self.begun.add(session, own, boundary)

    @property
    def begun(self) -> BegunRows:
        return BegunRows.in_forwards_of(self.runner)

    def state(self, session: Session) -> tuple[Tensor, ...]:
        """Keys, values and features of all that is cached."""
        slots = torch.from_numpy(session.table.slots(0, session.cached_len).copy())
        return *kv_state(self.runner, session), self.runner.cache.features[slots]


@pytest.fixture(params=["llama", "qwen3", "mistral"])
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    special = {"sliding_window": 19} if request.param == "mistral" else {}
    return write_tiny_model(tmp_path / "model", request.param, num_hidden_layers=NUM_LAYERS, **special)


@pytest.fixture(params=[True, False], ids=["fused", "single"])
def model(folder: Path, request: pytest.FixtureRequest) -> Iterator[Model]:
    """A model whose forward is one call of the kernels, or goes op by op."""
    runner = ModelRunner.load(str(folder), dtype="float32", kv_tokens=640)
    if not request.param:
        runner.model = runner.model._model  # type: ignore[attr-defined]
    yield Model(runner, {boundary: lower_runner(runner, boundary) for boundary in range(1, NUM_LAYERS)})
    close(runner)


@pytest.mark.parametrize("boundary", [1, 2, 3])
def test_a_forward_goes_on_where_a_draft_has_ended(model: Model, boundary: int) -> None:
    """Logits, keys, values and features of a chain are those of a whole forward."""
    whole, resumed = model.read(), model.read()
    model.guess(resumed, boundary)
    expected, found = (finish(model.runner, Feed(session, CHAIN))[0] for session in (whole, resumed))
    assert torch.equal(found, expected)
    for session in (whole, resumed):
        session.keep((1, 2, 3, 4))
    assert all(map(torch.equal, model.state(resumed), model.state(whole)))
    close(model.runner, whole, resumed)


def test_rows_of_others_begin_elsewhere(model: Model) -> None:
    """One forward of drafts that ended at two boundaries, of a prompt, of a plain step and of a bushy tree."""
    prompts = [random_ids(20 + number, number, 300) for number in range(5)]

    def feeds() -> list[Feed]:
        sessions = [*map(model.read, prompts[:4]), model.runner.open(prompts[4], 4)]
        return [Feed(each, tree) for each, tree in zip(sessions, (CHAIN, CHAIN, EMPTY, TREE, EMPTY), strict=True)]

    plain, mixed = feeds(), feeds()
    model.guess(mixed[0].session, 1)
    model.guess(mixed[1].session, 3)
    assert all(map(torch.equal, finish(model.runner, *mixed), finish(model.runner, *plain)))
    for one, other in zip(mixed, plain, strict=True):
        assert all(map(torch.equal, model.state(one.session), model.state(other.session)))
    close(model.runner, *(feed.session for feed in (*plain, *mixed)))


@pytest.mark.parametrize(
    ("tree", "num_begun"),
    [
        (CHAIN, 4),
        (TokenTree.chain((7, 8, 20, 10)), 3),
        (TokenTree.chain((20, 8, 9, 10)), 1),
        (TokenTree.chain((7,)), 2),
        (EMPTY, 1),
        (TREE, 1),
    ],
)
def test_only_rows_of_the_same_tokens_go_on(
    model: Model, tree: TokenTree, num_begun: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is checked in the end; layers below the boundary compute what is left, those above it all rows."""
    whole, resumed = model.read(), model.read()
    model.guess(resumed, 2)
    [expected] = finish(model.runner, Feed(whole, tree))
    counts = count_rows(model.runner, monkeypatch)
    [found] = finish(model.runner, Feed(resumed, tree))
    assert torch.equal(found, expected)
    num_rows = len(tree) + 1
    assert counts == Counter({0: num_rows - num_begun, 1: num_rows - num_begun, 2: num_rows, 3: num_rows})
    assert all(map(torch.equal, model.state(resumed), model.state(whole)))
    close(model.runner, whole, resumed)


def test_rows_cannot_go_on_where_nothing_was_stored(model: Model) -> None:
    """Nothing is computed from what lies there by chance."""
    session = model.read()
    model.guess(session, NUM_LAYERS - 1)
    model.runner.cache.keep_features(0)
    with pytest.raises(ValueError, match="nothing is tapped at boundary 3"):
        model.runner.forward([Feed(session)])
    close(model.runner, session)


def test_taps_of_several_stay_where_they_are(model: Model) -> None:
    """A later tap has the places after those that there are."""
    assert model.runner.cache.taps == (1, 2, 3)
    model.runner.tap((0, 2))
    assert model.runner.cache.taps == (1, 2, 3, 0)


CHANGES: tuple[Callable[[Session], object], ...] = (
    Session.free,
    lambda session: session.truncate(39),
    lambda session: session.extend([3]),
    lambda session: session.keep(()),
    lambda session: session.replace_tail(39, [4]),
    Session.take_prefix,
    lambda session: session_ahead(session, 2),
)


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_a_session_drops_its_rows(model: Model, change: Callable[[Session], object]) -> None:
    """And what is computed then is a fresh session's."""
    session = model.read()
    model.guess(session, 2)
    change(session)
    assert model.begun.of(session) == NO_ROWS
    fresh = model.runner.open(session.token_ids, 1)
    # Blocks that were given back have other tokens now.
    other = model.read(random_ids(64, 9, 300))
    logits = [finish(model.runner, Feed(each, CHAIN))[0] for each in (session, fresh)]
    assert torch.equal(*logits)
    close(model.runner, session, fresh, other)


def test_rows_follow_a_block_that_is_shared(model: Model) -> None:
    """A session that guesses in a block that another reads has a copy of its own, and the other's stays as it is."""
    first = model.read()
    finish(model.runner, Feed(first))
    first.publish(40)
    other = model.runner.open(PROMPT[:33], 33, b"salt")
    assert other.take_prefix() == 32
    other.truncate(20)
    before = model.state(first)
    model.guess(other, 2)
    whole = model.read(PROMPT[:20])
    assert torch.equal(*(finish(model.runner, Feed(each, CHAIN))[0] for each in (other, whole)))
    assert all(map(torch.equal, model.state(first), before))
    close(model.runner, first, other, whole)


def test_a_draft_without_room_changes_nothing(model: Model) -> None:
    """It takes no block, and the session goes on."""
    hog = model.runner.open(random_ids(560, 3, 300)[:250], 1)
    hog.reserve(550 - 250 + 16)
    session = model.read()
    num_free, before = model.runner.pool.num_free, len(session.table)
    with pytest.raises(CacheFull):
        session_ahead(session, 16 * num_free + 16)
    assert (model.runner.pool.num_free, len(session.table)) == (num_free, before)
    finish(model.runner, Feed(session))
    close(model.runner, hog, session)


def test_layers_that_cannot_be_are_refused(tmp_path: Path) -> None:
    """With one sentence."""
    folder = write_tiny_model(tmp_path / "model", "llama", num_hidden_layers=NUM_LAYERS)
    runner = ModelRunner.load(str(folder), dtype="float32", kv_tokens=640)
    for exit_layer in (-1, 0, 4, 9):
        with pytest.raises(ModelRefused, match=rf"^model: the exit layer is {exit_layer}, but must be in \[1, 3\]$"):
            lower_runner(runner, exit_layer)
    foreign = write_tiny_model(tmp_path / "foreign", "gpt2")
    for model in ("sim:h100-1b", str(foreign)):
        with pytest.raises(ModelRefused, match=r"cannot be computed layer by layer, and so has no exit layer$"):
            lower_runner(ModelRunner.load(model, kv_tokens=64), 1)
