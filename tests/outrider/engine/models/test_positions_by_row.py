"""Windows and scaled positions keep the rule of the CPU path: a row's bits are its own, however the work is cut up."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.engine_cases import kv_state
from support.models.model_cases import SCALINGS, THETA, WINDOWS, random_ids
from support.models.tiny_models import write_tiny_model
from torch import Tensor

from outrider.engine import runner as runner_module
from outrider.engine.batching import Feed, RowPlan
from outrider.engine.ops.reference import ReferenceOps
from outrider.engine.runner import ModelRunner
from outrider.engine.session import Session
from outrider.token_tree import EMPTY, TokenTree

# A wide tree, deeper than the shortest windows, whose paths share rows.
TREE = TokenTree(
    token_ids=(11, 22, 33, 44, 55, 66, 77, 88, 99, 111, 122),
    parents=(0, 0, 1, 1, 2, 5, 6, 3, 7, 9, 10),
)
SCALED = {
    name: ("llama", {"context_len": 64, "rope_parameters": {"rope_theta": THETA, **SCALINGS[name]}})
    for name in ("dynamic", "yarn", "linear")
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = WINDOWS | SCALED

DTYPES = ("bfloat16", "float32")
# Operations in torch take a hundred times as long, and know nothing of where a window or a table comes from.
CASES = [(model, dtype, "chosen") for model in MODELS for dtype in DTYPES]
CASES += [(model, dtype, "reference") for model in ("mistral-7", "qwen2-from-layer-1") for dtype in DTYPES]

EACH = pytest.mark.parametrize(("model", "dtype", "kernels"), CASES, ids=map("-".join, CASES))
WINDOWED = [case for case in CASES if case[0] in WINDOWS]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """All tiny models, written once."""
    base = tmp_path_factory.mktemp("models")
    return {
        name: write_tiny_model(base / name, family, seed=7, **overrides) for name, (family, overrides) in MODELS.items()
    }


@pytest.fixture
def runner(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, model: str, dtype: str, kernels: str
) -> Iterator[ModelRunner]:
    """A tiny model in one weight type, with compiled operations or those in torch."""
    if kernels == "reference":
        monkeypatch.setattr(runner_module, "choose_ops", lambda *given: ReferenceOps(given[2]))
    num_threads = torch.get_num_threads()
    # Products of one row are so small that torch's team would only wait for each other.
    torch.set_num_threads(1)
    yield ModelRunner.load(str(folders[model]), dtype=dtype, num_threads=2, kv_tokens=4096)
    torch.set_num_threads(num_threads)


def length_for(runner: ModelRunner) -> int:
    """Tokens of a prompt that is longer than the windows and original contexts of the cases that it is for."""
    return 20 if isinstance(runner.ops, ReferenceOps) else 80


def computed(runner: ModelRunner, *feeds: Feed) -> list[Tensor]:
    """The logits of each feed, root first, in as many forwards as it takes."""
    logits: dict[int, Tensor] = {}
    while waiting := [index for index in range(len(feeds)) if index not in logits]:
        result = runner.forward([feeds[index] for index in waiting])
        for index, rows in zip(waiting, result.ranges, strict=True):
            if rows is not None:
                logits[index] = result.logits[rows.start : rows.stop].clone()
    return [logits[index] for index in range(len(feeds))]


def fresh(runner: ModelRunner, token_ids: Sequence[int], tree: TokenTree = EMPTY) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, keys and values of a session of its own, in one forward."""
    session = runner.open(token_ids, 1)
    (logits,) = computed(runner, Feed(session, tree))
    keys, values = kv_state(runner, session)
    session.free()
    return logits, keys, values


def assert_like_fresh(runner: ModelRunner, session: Session) -> None:
    """Asserts that its cache holds bitwise what a prefill of its tokens in one forward would."""
    for kept, expected in zip(kv_state(runner, session), fresh(runner, session.token_ids)[1:], strict=True):
        assert torch.equal(kept, expected)


@pytest.mark.slow
@EACH
def test_prefill_chunks_and_single_steps_agree(runner: ModelRunner) -> None:
    """A prompt at once, in chunks of 7, and token by token: every row's logits and the whole cache."""
    token_ids = random_ids(length_for(runner), 300)
    chain = TokenTree.chain(token_ids[1:])
    at_once = fresh(runner, token_ids[:1], chain)[0]
    stepped, chunked = runner.open(token_ids[:1], 1), runner.open(token_ids, 1)
    for position in range(len(token_ids)):
        assert torch.equal(computed(runner, Feed(stepped))[0][0], at_once[position])
        stepped.extend(token_ids[position + 1 : position + 2])
    runner.max_rows = 7
    assert torch.equal(computed(runner, Feed(chunked))[0][0], at_once[-1])
    runner.max_rows = 512
    assert_like_fresh(runner, stepped)
    assert_like_fresh(runner, chunked)


@pytest.mark.slow
@EACH
def test_sixteen_sessions_do_not_see_each_other(runner: ModelRunner) -> None:
    """Batch 16, some with chains and some with trees: each as if it were alone."""
    prompts = [random_ids(1 + length_for(runner) * index // 15, 300) for index in range(16)]
    trees = [(EMPTY, TREE, TokenTree.chain(range(1, 9)))[index % 3] for index in range(16)]
    sessions = [runner.open(prompt, 1) for prompt in prompts]
    feeds = [Feed(session, tree) for session, tree in zip(sessions, trees, strict=True)]
    for session, tree, logits in zip(sessions, trees, computed(runner, *feeds), strict=True):
        assert torch.equal(logits, fresh(runner, session.token_ids, tree)[0])
        assert_like_fresh(runner, session)


@pytest.mark.slow
@EACH
def test_every_row_of_a_tree_is_its_own_path(runner: ModelRunner) -> None:
    """A row deep in a tree has the bits of plain decoding along its path, and kept rows are as good as new."""
    prompt = random_ids(length_for(runner) - 5, 300)
    session = runner.open(prompt, 1)
    (logits,) = computed(runner, Feed(session, TREE))
    for row in range(len(TREE) + 1):
        path = [TREE.token_ids[each - 1] for each in TREE.path(row)]
        assert torch.equal(logits[row], fresh(runner, [*prompt, *path])[0][-1])
    session.keep((2, 5, 6, 7, 9))
    assert_like_fresh(runner, session)
    # What a window hid is in sight again.
    session.truncate(10)
    session.extend(prompt[10:])
    assert torch.equal(computed(runner, Feed(session))[0], fresh(runner, prompt)[0])
    assert_like_fresh(runner, session)


@pytest.mark.parametrize(("model", "dtype", "kernels"), WINDOWED, ids=map("-".join, WINDOWED))
def test_a_window_of_the_forward_would_be_noticed(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted bug: windows counted from the longest row of a forward instead of from each one."""

    def windowed(self: RowPlan, window: int | None) -> RowPlan:
        if window is None or self.max_key_count <= window:
            return self
        return whole(self, window + int(self.key_counts.max() - self.key_counts.min()))

    whole = RowPlan.windowed
    monkeypatch.setattr(RowPlan, "windowed", windowed)
    with pytest.raises(AssertionError):
        test_prefill_chunks_and_single_steps_agree(runner)
