"""`python -m gateway.lookup.datastore.command`: what `outrider datastore` runs; building needs numpy."""

import json
import sys
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TextIO

import tokenizers
import typer

from gateway.lookup.datastore.build import build
from gateway.lookup.datastore.layout import DatastoreHead
from gateway.lookup.datastore.reader import Datastore, Ints
from outrider.errors import InvalidRequest, ModelRefused
from outrider.model_files.tokenizer_files import load_tokenizer
from outrider.model_files.vocabulary import Vocabulary
from outrider.process.options import run_app, service_app

BATCH = 256  # pieces that are encoded side by side
PIECE_LEN = 1 << 16  # characters of a piece, and then up to the end of a line
SHOWN_TOKENS = 8
STDIN = "-"

app = service_app()

TokenizerOption = Annotated[
    str, typer.Option(help="Folder or hub id of the model whose tokens are stored, or its name.", metavar="MODEL")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


class Piece(NamedTuple):
    """Lines of a text that are encoded together, and whether a document begins with them."""

    text: str
    begins: bool


@app.callback()
def group() -> None:
    """Makes datastores to look up in, and shows what is in them."""


@app.command("build")
def build_command(
    texts: Annotated[
        list[str],
        typer.Argument(
            help="Text files, each one document; .jsonl files, of which each line is one; - reads text from standard "
            "input.",
            metavar="TEXT...",
            show_default=False,
        ),
    ],
    *,
    tokenizer: TokenizerOption,
    out: Annotated[Path, typer.Option(help="File to write.", metavar="FILE")],
    field: Annotated[str, typer.Option(help="Field of a line of .jsonl that is the text.", metavar="NAME")] = "text",
    force: Annotated[bool, typer.Option("--force", help="Replace the file when there is one.")] = False,
    as_json: Json = False,
) -> None:
    """Builds a datastore from texts; progress goes to standard error."""
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise InvalidRequest("--out", str(out), "a file in a folder that exists")
    if out.exists() and not force:
        raise InvalidRequest("--out", str(out), "a file that is not there yet; --force replaces it")
    encoder = load_tokenizer(tokenizer)
    documents = encode(encoder, (piece for text in texts for piece in read_pieces(text, field)))
    try:
        head = build(documents, _vocabulary(encoder), out, lambda words: typer.echo(words, err=True))
    except OSError as error:
        raise InvalidRequest("--out", str(out), f"a file that can be written: {error.strerror}") from None
    _tell(out, facts(out, head), as_json=as_json)


@app.command()
def inspect(
    file: Annotated[Path, typer.Argument(help="Datastore to look at.", metavar="FILE", show_default=False)],
    *,
    query: Annotated[str | None, typer.Option(help="Text to continue.", metavar="TEXT")] = None,
    tokenizer: TokenizerOption = "",
    as_json: Json = False,
) -> None:
    """Shows what a datastore holds, whether it is whole, and with --query what it would propose after a text."""
    if (query is None) != (not tokenizer):
        raise InvalidRequest("--tokenizer", tokenizer, "given with --query, and only with it")
    store = Datastore(file)
    if not store.is_whole():
        raise ModelRefused(f"{file} is damaged: what it holds is not what it was written with")
    told: dict[str, Any] = facts(file, store.head)
    if query is not None:
        encoder = load_tokenizer(tokenizer)
        Datastore.open(file, _vocabulary(encoder))
        told["proposals"] = proposals(store, encoder, query)
    _tell(file, told, as_json=as_json)


def facts(file: Path, head: DatastoreHead) -> dict[str, Any]:
    """Facts about a file, as plain values for JSON."""
    return {
        "documents": head.num_documents,
        "tokens": head.num_tokens,
        "places": head.num_places,
        "bytes": file.stat().st_size,
        "vocabulary": head.vocabulary.size,
        "digest": head.digest,
    }


def proposals(store: Datastore, encoder: tokenizers.Tokenizer, query: str) -> list[dict[str, Any]]:
    """Continuations of the longest matches with a text's end, the longest and then the most frequent first."""
    token_ids = array("i", encoder.encode(query, add_special_tokens=False).ids)
    counts = Counter((length, continuation(store.tokens, place)) for place, length in store.find(token_ids))
    ranked = sorted(counts.items(), key=lambda item: (-item[0][0], -item[1]))
    return [
        {"match": length, "times": times, "text": encoder.decode(list(found)), "token_ids": list(found)}
        for (length, found), times in ranked
    ]


def continuation(tokens: Ints, place: int) -> tuple[int, ...]:
    """Next tokens of a document after a place."""
    found = tokens[place : place + SHOWN_TOKENS]
    end = next((index for index, token_id in enumerate(found) if token_id < 0), len(found))
    return tuple(found[:end])


def read_pieces(name: str, field: str) -> Iterator[Piece]:
    """The documents of a file in pieces. Raises InvalidRequest about what is no text."""
    try:
        with ExitStack() as stack:
            source: TextIO = sys.stdin
            if name == STDIN:
                sys.stdin.reconfigure(encoding="utf-8", errors="strict")  # type: ignore[union-attr]
            else:
                source = stack.enter_context(Path(name).open(encoding="utf-8"))
            if name.endswith(".jsonl"):
                for number, line in enumerate(source, start=1):
                    try:
                        text = json.loads(line)[field]
                    except (ValueError, KeyError, TypeError):
                        text = None
                    if not isinstance(text, str):
                        limit = f"an object whose {field!r} is a text"
                        raise InvalidRequest(f"line {number} of {name}", line.strip(), limit)
                    yield Piece(text, begins=True)
                return
            begins = True
            while lines := source.readlines(PIECE_LEN):
                yield Piece("".join(lines), begins)
                begins = False
    except UnicodeError:
        raise InvalidRequest("TEXT", name, "UTF-8") from None
    except OSError as error:
        raise InvalidRequest("TEXT", name, f"a file that can be read: {error.strerror}") from None


def encode(encoder: tokenizers.Tokenizer, pieces: Iterable[Piece]) -> Iterator[list[int]]:
    """The token ids of each document, without special tokens."""
    waiting, document = iter(pieces), list[int]()
    while batch := list(islice(waiting, BATCH)):
        texts = [piece.text for piece in batch]
        for piece, encoding in zip(batch, encoder.encode_batch_fast(texts, add_special_tokens=False), strict=True):
            if piece.begins:
                yield document
                document = []
            document += encoding.ids
    yield document


def _vocabulary(encoder: tokenizers.Tokenizer) -> Vocabulary:
    return Vocabulary.of(encoder.get_vocab(with_added_tokens=True).items())


def _tell(file: Path, told: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps({"file": str(file), **told}) + "\n")
        return
    numbers = ", ".join(f"{told[name]:,} {name}" for name in ("documents", "tokens", "bytes"))
    sys.stdout.write(f"{file}: {numbers}, a vocabulary of {told['vocabulary']:,} ids, digest {told['digest']}\n")
    for each in told.get("proposals", []):
        sys.stdout.write(f"  {each['match']} matching, {each['times']} times: {each['text']!r}\n")
    if told.get("proposals") == []:
        sys.stdout.write("  Nothing in it follows that text.\n")


if __name__ == "__main__":
    run_app(lambda: app(prog_name="outrider datastore", standalone_mode=False), prefix="outrider: ")
