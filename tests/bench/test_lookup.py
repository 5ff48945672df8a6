"""bench.lookup on small texts: what it prints, and that what it replays is decoded; not how fast anything was."""

from pathlib import Path

import pytest

from bench.lookup import main, replay
from gateway.lookup.rates import LookupRates
from gateway.lookup.session import LookupSession


@pytest.mark.grid
def test_all_tables_are_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A file that is named is built once, and opened the second time."""
    store = tmp_path / "store"
    options = ["lookup", "--tokens", "5000", "--store-tokens", "5000", "--rows", "4", "--store", str(store)]
    for is_built in (True, False):
        monkeypatch.setattr("sys.argv", options)
        main()
        printed = capsys.readouterr().out
        for line in ("| 2,048 |", "| own text, chain |", "| and the answer as prediction |", "| tokens | 5,000 |"):
            assert line in printed
        assert ("| build, s |" in printed) is is_built
    assert store.is_file()


def test_a_replay_takes_as_many_rounds_as_there_are_wrong_guesses() -> None:
    """Of a copy each round takes all its rows and a token more, of new text one token."""
    text = list(range(100))
    times_us, num_rounds = replay(LookupSession(text, rates=LookupRates()), text[10:63], 4, chain=False)
    assert num_rounds == len(times_us) == 3 + 50 / 5
    assert replay(LookupSession(text, rates=LookupRates()), range(200, 230), 4, chain=True)[1] == 30
