"""Sessions forked from one on paths of its tree: each has what a session of its own would have computed."""

from pathlib import Path

import pytest
from support.models.engine_cases import TREE, assert_like_fresh, close, finish, random_ids
from support.models.tiny_models import write_tiny_model

from outrider.engine.batching import Feed
from outrider.engine.runner import ModelRunner
from outrider.engine.session import Session

# Two that move rows, one that is a chain and moves none, and the root's own.
PATHS = ((2, 5, 6, 7), (1, 4), (1,), ())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model", "llama")


def branched(runner: ModelRunner, prompt_len: int) -> tuple[Session, list[Session]]:
    """A session after a forward with a tree, and a fork for each path but the last."""
    session = runner.open(random_ids(prompt_len, vocab_size=300), 1)
    session.reserve(len(TREE))
    finish(runner, Feed(session, TREE))
    return session, [session.fork(path) for path in PATHS[:-1]]


@pytest.mark.parametrize("prompt_len", [5, 15, 16, 17, 30])
@pytest.mark.parametrize("last", PATHS)
def test_forks_have_what_they_would_have_computed(folder: Path, prompt_len: int, last: tuple[int, ...]) -> None:
    """Whatever the session goes on with, and whichever of them writes next."""
    runner = ModelRunner.load(str(folder), dtype="float32", kv_tokens=512)
    session, forks = branched(runner, prompt_len)
    session.keep(last)
    everyone = [*forks, session]
    for each, path in zip(everyone, (*PATHS[:-1], last), strict=True):
        assert each.token_ids[prompt_len:] == [TREE.token_ids[row - 1] for row in path]
        assert_like_fresh(runner, each)
    for number, each in enumerate(everyone):
        each.extend([number])
        each.reserve()
        finish(runner, Feed(each))
    for each in everyone:
        assert_like_fresh(runner, each)
    close(runner, *everyone)


def test_without_room_for_copies_only_tokens_go_along(folder: Path) -> None:
    runner = ModelRunner.load(str(folder), dtype="float32", kv_tokens=32)
    session, forks = branched(runner, 17)
    assert [each.token_ids[17:] for each in forks] == [[TREE.token_ids[row - 1] for row in path] for path in PATHS[:-1]]
    assert [each.cached_len for each in forks] == [17, 17, 18]
    session.keep_with_room(PATHS[1])
    assert (len(session), session.cached_len) == (19, 17)
    close(runner, session, *forks)
