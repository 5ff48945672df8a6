"""The same answers by each surface, timed where the client is: first tokens, gaps, and plain GETs. No gate.

    python -m bench.surfaces [--root DIR | --rest HOST:PORT --grpc HOST:PORT] [--turns 60] [--tokens 48]

gRPC has one connection, and all of HTTP another, which are kept. A turn asks every surface for the same answer, one
after the other and in another order each turn, and compares the tokens; no prompt is found in a cache. Without
addresses it serves the embedded pair of a checkout, this one by default. Times are taken when bytes have come, before
they are parsed.
"""

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from functools import partial
from http.client import HTTPConnection
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from bench.common import OPENINGS, machine, markdown, revision, spread
from bench.house import serving
from bench.versions import compare
from outrider.client import Client, Round, Speculation

TIMEOUT_S = 120.0
TEMPERATURE = 0.8
# Asked so often a turn, one behind the other.
PATHS, GETS = ("/live", "/"), 5
WAYS = GRPC, REST, PAGE = "gRPC", "/v1/completions", "/page/generate"


class Heard(NamedTuple):
    """An answer at its client: milliseconds to its first tokens, between bursts of tokens and in all; the tokens."""

    first_ms: float
    gaps_ms: list[float]
    total_ms: float
    token_ids: list[int]


Asked = Mapping[str, Any]
"""An answer to ask for, in REST's names."""
Bursts = Iterator[tuple[float, list[int]]]
"""When bytes came, and which tokens were in them."""


def over_grpc(client: Client, asked: Asked) -> Bursts:
    """The answer over gRPC."""
    shared = {name: asked[name] for name in ("seed", "temperature", "max_tokens", "ignore_eos", "cache_salt")}
    speculation = Speculation(draft_count=asked["speculation"]["draft_count"])
    for event in client.generate(asked["prompt"], **shared, speculation=speculation, timeout_s=TIMEOUT_S):
        came_s = time.perf_counter()
        yield came_s, [token.token_id for token in event.tokens] if isinstance(event, Round) else []


def over_http(connection: HTTPConnection, path: str, asked: Asked) -> Bursts:
    """The answer as server-sent events, of chunks or of the page's rounds. Raises RuntimeError about any but 200."""
    body = {**asked, **({"stream": True, "return_token_ids": True} if path == REST else {})}
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    reply = connection.getresponse()
    if reply.status != 200:
        raise RuntimeError(f"{path} answered {reply.status}: {reply.read().decode()}")
    while sent := reply.readline():
        came_s = time.perf_counter()
        if sent.startswith(b"data: {"):
            event = json.loads(sent.removeprefix(b"data: "))
            yield came_s, [token_id for each in event.get("choices", [event]) for token_id in token_ids_of(each)]


def token_ids_of(event: Mapping[str, Any]) -> list[int]:
    """Those of a chunk's choice, or of an event of the page."""
    return event.get("token_ids") or [token["token_id"] for token in event.get("tokens", ())]


def heard(bursts: Bursts) -> Heard:
    """Listens to an answer to its end. Raises RuntimeError when it has no tokens."""
    started_s = time.perf_counter()
    found = [(came_s, token_ids) for came_s, token_ids in bursts if token_ids]
    ended_s = time.perf_counter()
    if not found:
        raise RuntimeError("an answer without tokens")
    times_s = [came_s for came_s, _ in found]
    gaps_ms = [1e3 * (after - before) for before, after in pairwise(times_s)]
    token_ids = [token_id for _, burst in found for token_id in burst]
    return Heard(1e3 * (times_s[0] - started_s), gaps_ms, 1e3 * (ended_s - started_s), token_ids)


def fetched_ms(connection: HTTPConnection, path: str) -> float:
    """Milliseconds of a GET. Raises RuntimeError about any answer but 200."""
    started_s = time.perf_counter()
    connection.request("GET", path)
    reply = connection.getresponse()
    reply.read()
    if reply.status != 200:
        raise RuntimeError(f"{path} answered {reply.status}")
    return 1e3 * (time.perf_counter() - started_s)


def measure(
    rest: str, grpc: str, turns: int, tokens: int, draft_count: int
) -> tuple[dict[str, list[Heard]], dict[str, list[float]]]:
    """What came of each surface, and the milliseconds of GETs by path. Raises TokensDiffer."""
    answers: dict[str, list[Heard]] = defaultdict(list)
    gets_ms: dict[str, list[float]] = defaultdict(list)
    with ExitStack() as stack:
        http = stack.enter_context(closing(HTTPConnection(rest, timeout=TIMEOUT_S)))
        ways: dict[str, Callable[[Asked], Bursts]] = {
            GRPC: partial(over_grpc, stack.enter_context(Client(grpc))),
            REST: partial(over_http, http, REST),
            PAGE: partial(over_http, http, PAGE),
        }
        for turn in range(turns + 1):
            asked: Asked = {
                "prompt": OPENINGS[turn % len(OPENINGS)],
                "seed": turn,
                "temperature": TEMPERATURE,
                "max_tokens": tokens,
                "ignore_eos": True,
                "speculation": {"draft_count": draft_count},
            }
            first = turn % len(WAYS)
            said = {
                way: heard(ways[way]({**asked, "cache_salt": f"{turn} {way}"}))
                for way in (*WAYS[first:], *WAYS[:first])
            }
            compare({way: each.token_ids for way, each in said.items()}, asked["prompt"])
            took_ms = {path: [fetched_ms(http, path) for _ in range(GETS)] for path in PATHS}
            # The first turn is to warm up.
            if turn:
                for way, each in said.items():
                    answers[way].append(each)
                for path, each_ms in took_ms.items():
                    gets_ms[path] += each_ms
    return answers, gets_ms


def render(answers: Mapping[str, list[Heard]], gets_ms: Mapping[str, list[float]]) -> str:
    """Medians with quartiles of each surface and of GETs; first tokens also beyond gRPC's of the same turn."""
    figures: dict[str, Callable[[Heard], list[float]]] = {
        "first tokens": lambda each: [each.first_ms],
        "gap between bursts": lambda each: each.gaps_ms,
        "whole answer": lambda each: [each.total_ms],
    }
    rows = [
        [name, *(spread(ms for each in answers[way] for ms in take(each)).show(".2f") for way in WAYS)]
        for name, take in figures.items()
    ]
    beyond = []
    for way in WAYS:
        pairs = zip(answers[GRPC], answers[way], strict=True)
        beyond.append(spread(each.first_ms - base.first_ms for base, each in pairs).show(".2f"))
    rows.append(["first tokens beyond gRPC's", *beyond])
    gets = [[f"GET {path}", spread(times_ms).show(".2f")] for path, times_ms in gets_ms.items()]
    head = "ms, medians (quartiles)"
    return f"{markdown([head, *WAYS], rows)}\n\n{markdown([head, 'kept-alive connection'], gets)}"


def main() -> None:
    """Measures, and prints."""
    parser = argparse.ArgumentParser(prog="python -m bench.surfaces", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1], help="checkout to serve")
    parser.add_argument("--rest", help="where a running gateway serves REST, as HOST:PORT")
    parser.add_argument("--grpc", help="and where it serves gRPC")
    parser.add_argument("--turns", type=int, default=60, help="answers of each surface")
    parser.add_argument("--tokens", type=int, default=48, help="tokens an answer")
    parser.add_argument("--draft-count", type=int, default=4, help="draft tokens a round")
    given = parser.parse_args()
    if (given.rest is None) != (given.grpc is None):
        parser.error("--rest and --grpc name one gateway: give both or neither")
    with ExitStack() as stack:
        if given.rest is None:
            event = stack.enter_context(serving(given.root.resolve(), []))
            given.rest, given.grpc = event["rest"], event["gateway"]
        found = measure(given.rest, given.grpc, given.turns, given.tokens, given.draft_count)
    print(f"{machine()}; {given.turns} answers of {given.tokens} tokens, K = {given.draft_count};")
    print(f"commit {revision() or 'unknown'}.\n\n{render(*found)}")


if __name__ == "__main__":
    main()
