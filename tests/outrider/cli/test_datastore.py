"""`outrider datastore` as a process and its commands in this one: what they print and write, and their exit codes."""

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers

from gateway.lookup.datastore.command import app
from gateway.lookup.datastore.reader import Datastore
from outrider.model_files.model_names import embedded_model
from outrider.model_files.vocabulary import Vocabulary
from outrider.process.options import run_app

COMMAND = (sys.executable, "-c", "from outrider.cli import main; main()", "datastore")
MODEL = embedded_model("target")
TEXT = "Once upon a time there was a little dog.\nThe little dog was happy.\n"

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs what the process would run; returns exit code, stdout and stderr."""

    def run_command(*arguments: str | Path) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ending:
            run_app(lambda: app([*map(str, arguments)], standalone_mode=False), prefix="outrider: ")
        assert isinstance(ending.value.code, int)
        return ending.value.code, *capsys.readouterr()

    return run_command


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder with a text and a file of two documents."""
    (tmp_path / "one.txt").write_text(TEXT)
    lines = [{"text": "Once upon a time there was a little cat.", "body": "a"}, {"text": "A dog.", "body": "b"}]
    (tmp_path / "two.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


@pytest.mark.slow
def test_what_is_built_can_be_used(texts: Path) -> None:
    """Files and standard input; the file has the target's own tokens and vocabulary."""
    out = texts / "store"
    words = ("build", "--tokenizer", MODEL, "--out", out, texts / "one.txt", texts / "two.jsonl", "-")
    ended = subprocess.run([*COMMAND, *words], capture_output=True, check=False, text=True, input="So it was.")
    assert (ended.returncode, ended.stderr[:7]) == (0, "Sorting")
    tokenizer = tokenizers.Tokenizer.from_file(f"{MODEL}/tokenizer.json")
    store = Datastore.open(out, Vocabulary.read(MODEL))
    expected = []
    for text in (TEXT, "Once upon a time there was a little cat.", "A dog.", "So it was."):
        expected += [*tokenizer.encode(text, add_special_tokens=False).ids, -1]
    assert list(store.tokens)[16:] == expected
    num_tokens = len(expected) - 4
    size = out.stat().st_size
    facts = f"{out}: 4 documents, {num_tokens} tokens, {size:,} bytes, a vocabulary of 4,096 ids, digest "
    assert ended.stdout == facts + store.head.digest + "\n"


def test_what_is_in_it_is_shown(texts: Path, run: Run) -> None:
    """Facts, and after a text what it would propose; as text and as an object."""
    out = texts / "store"
    build = ("build", "--tokenizer", MODEL, "--out", out)
    code, built, _ = run(*build, "--json", texts / "one.txt", texts / "two.jsonl", texts / "one.txt")
    assert code == 0
    assert json.loads(built)["documents"] == 4
    assert run("inspect", out, "--json") == (0, built, "")
    code, printed, notes = run("inspect", out, "--query", "Once upon a time there", "--tokenizer", MODEL)
    assert (code, notes) == (0, "")
    assert printed.splitlines()[1:] == [
        "  5 matching, 2 times: ' was a little dog.\\nThe little'",
        "  5 matching, 1 times: ' was a little cat.'",
    ]
    code, printed, _ = run("inspect", out, "--query", "zebra", "--tokenizer", MODEL)
    assert printed.splitlines()[1:] == ["  Nothing in it follows that text."]
    code, printed, _ = run("inspect", out, "--query", "there was a little cat", "--tokenizer", MODEL, "--json")
    [proposal] = json.loads(printed)["proposals"]
    assert (proposal["times"], proposal["text"]) == (1, ".")


def test_a_file_is_replaced_only_by_force(texts: Path, run: Run) -> None:
    """Without it the file stays as it is."""
    out = texts / "store"
    build = ("build", "--tokenizer", MODEL, "--out", out, texts / "two.jsonl")
    assert run(*build)[0] == 0
    before = out.read_bytes()
    words = f"outrider: --out is {str(out)!r}, but must be a file that is not there yet; --force replaces it\n"
    assert run(*build, "--field", "body") == (64, "", words)
    assert out.read_bytes() == before
    assert run(*build, "--field", "body", "--force")[0] == 0
    assert out.read_bytes() != before


def test_a_long_text_is_one_document(texts: Path, run: Run) -> None:
    """However many pieces it is encoded in; between files there is none that both are of."""
    (texts / "long.txt").write_text(TEXT * 3000)
    out = texts / "store"
    told = run("build", "--json", "--tokenizer", MODEL, "--out", out, texts / "long.txt", texts / "one.txt")
    assert json.loads(told[1])["documents"] == 2


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("build", "--tokenizer", MODEL, "--out", "{new}", "{no}"), 64, "TEXT is '{no}', but must be a file that can"),
        (("build", "--tokenizer", MODEL, "--out", "{new}", "{bytes}"), 64, "TEXT is '{bytes}', but must be UTF-8"),
        (
            ("build", "--tokenizer", MODEL, "--out", "{new}", "{two}", "--field", "words"),
            64,
            'line 1 of {two} is \'{{"text": "Once upon a time',
        ),
        (("build", "--tokenizer", MODEL, "--out", "{no}/new", "{two}"), 64, "--out is '{no}"),
        (("build", "--tokenizer", "{no}", "--out", "{new}", "{two}"), 78, "{no} has no tokenizer.json that can be"),
        (("build", "--tokenizer", MODEL, "--out", "{new}", "-"), 78, "There is nothing to build a datastore of"),
        (("build", "--out", "{new}", "{two}"), 64, "Missing option '--tokenizer'"),
        (("inspect", "{two}"), 78, "{two} is no datastore"),
        (("inspect", "{two}", "--query", "a"), 64, "--tokenizer is '', but must be given with --query"),
        (("inspect", "{two}", "--tokenizer", MODEL), 64, "--tokenizer is '{model}', but must be given with --query"),
    ],
)
def test_what_is_wrong_is_one_sentence(
    texts: Path, run: Run, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], code: int, words: str
) -> None:
    """With the codes of wrong usage and of what cannot be used, and nothing is written."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    (texts / "bytes").write_bytes(b"\xff\xfe\xff")
    names = {
        name: texts / file for name, file in (("new", "new"), ("no", "no"), ("bytes", "bytes"), ("two", "two.jsonl"))
    }
    found, printed, notes = run(*(word.format(**names) for word in arguments))
    assert (found, printed) == (code, "")
    assert notes.splitlines()[-1].startswith("outrider: " + words.format(model=MODEL, **names))
    assert not (texts / "new").exists()


def test_damage_is_told(texts: Path, run: Run) -> None:
    """By `inspect`, which reads everything."""
    out = texts / "store"
    run("build", "--tokenizer", MODEL, "--out", out, texts / "two.jsonl")
    data = bytearray(out.read_bytes())
    data[-100] ^= 1
    out.write_bytes(data)
    words = f"outrider: {out} is damaged: what it holds is not what it was written with\n"
    assert run("inspect", out) == (78, "", words)


@pytest.mark.slow
def test_a_place_that_cannot_be_written_is_named(texts: Path) -> None:
    """One sentence, and nothing of the file is left."""
    out = texts / "store"
    words = ("build", "--tokenizer", MODEL, "--out", str(out), str(texts / "one.txt"))
    line = ("bash", "-c", 'ulimit -f 0; exec "$@"', "bash", *COMMAND, *words)
    ended = subprocess.run(line, capture_output=True, check=False, text=True)
    assert ended.returncode == 64
    assert ended.stderr.splitlines()[-1] == (
        f"outrider: --out is {str(out)!r}, but must be a file that can be written: File too large"
    )
    assert sorted(each.name for each in texts.iterdir()) == ["one.txt", "two.jsonl"]
