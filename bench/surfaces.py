"""Times of equal answers by each surface, taken where the client is: first tokens, gaps, and plain GETs. No gate.

    python -m bench.surfaces [--root DIR | --rest HOST:PORT --grpc HOST:PORT] [--turns 60] [--tokens 48] [--answers]

gRPC has one connection, and all of HTTP another, which are kept. A turn asks every surface for the same answer, one
after the other and in another order each turn, and compares the tokens; no prompt is found in a cache. Without
addresses it serves what `outrider up` of a checkout does, this one by default. Times are taken when bytes have come,
before they are parsed. With --answers it asks README's examples and ten questions of fact through every door, with a
seed and a length and nothing else, and prints what came, and whether each door said the same.
"""

import argparse
import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from functools import partial
from http.client import HTTPConnection
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from bench.house.stack import serving
from bench.versions import compare
from outrider.cli.bench.common import OPENINGS, machine, markdown, revision, spread
from outrider.client import Client, Round, Speculation

TIMEOUT_S = 120.0
TEMPERATURE = 0.8
# Number of times that each is asked in a turn, one after the other.
PATHS, GETS = ("/live", "/"), 5
WAYS = GRPC, REST, PAGE = "gRPC", "/v1/completions", "/page/generate"
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


class Heard(NamedTuple):
    """An answer at its client: milliseconds to its first tokens, between bursts of tokens and in all; the tokens."""

    first_ms: float
    gaps_ms: list[float]
    total_ms: float
    token_ids: list[int]


class Said(NamedTuple):
    """An answer by one surface; some surfaces report no token ids."""

    text: str
    token_ids: tuple[int, ...] | None


COMMAND = (sys.executable, "-c", "from outrider.cli import main; main()")
STORY, SKY = "The fox said to the wolf,", "Why is the sky blue?"
FACTS = {
    "What is the capital of France?": "Paris",
    "What is the capital of Italy?": "Rome",
    "What is the capital of Japan?": "Tokyo",
    "What is the capital of Germany?": "Berlin",
    "What is the largest planet in the solar system?": "Jupiter",
    "Which planet is closest to the Sun?": "Mercury",
    "What is the chemical formula of water?": "H2O",
    "Who wrote Romeo and Juliet?": "Shakespeare",
    "How many days are there in a week?": "7",
    "What is the freezing point of water in degrees Celsius?": "is 0",
}
"""Questions, and what a right answer has in it."""


Asked = Mapping[str, Any]
"""An answer to ask for, in REST's names."""
Bursts = Iterator[tuple[float, list[int]]]
"""Times when bytes came, and the tokens that were in them."""


def over_grpc(client: Client, asked: Asked) -> Bursts:
    """Bursts of an answer over gRPC."""
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
    """Token ids of a chunk's choice, or of an event of the page."""
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
    """Times of each surface's answers, and milliseconds of GETs by path. Raises TokensDiffer."""
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


def replied(rest: str, path: str, body: Asked) -> dict[str, Any]:
    """Answer of a route of REST. Raises RuntimeError about any answer but 200."""
    with closing(HTTPConnection(rest, timeout=TIMEOUT_S)) as connection:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        reply = connection.getresponse()
        told = reply.read()
    if reply.status != 200:
        raise RuntimeError(f"{path} answered {reply.status}: {told.decode()}")
    return dict(json.loads(told))


def by_page(rest: str, body: Asked) -> Said:
    """Answer that the page gets, where a fresh one asks."""
    with closing(HTTPConnection(rest, timeout=TIMEOUT_S)) as connection:
        auto = {"enabled": True, "draft_count": "auto", "rule": "match", "return_rounds": True}
        fresh = {**body, "seed": str(body["seed"]), "speculation": auto, "probabilities": True}
        connection.request("POST", PAGE, json.dumps(fresh), {"content-type": "application/json"})
        lines = connection.getresponse().read().decode().splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    tokens = [token for event in events for token in event.get("tokens", ())]
    return Said(
        "".join(each["text"] for each in tokens) + events[-1]["text"], tuple(each["token_id"] for each in tokens)
    )


def by_command(typed: str, *words: str) -> Said:
    """Answer that a command prints as JSON. Raises CalledProcessError when it fails."""
    done = subprocess.run((*COMMAND, *words, "--json"), input=typed, capture_output=True, text=True, check=True)
    told = json.loads(done.stdout)
    answer = told["samples"][0] if "samples" in told else told
    return Said(answer["text"], tuple(answer["token_ids"]))


def continued(rest: str, grpc: str, prompt: str, seed: int, max_tokens: int) -> dict[str, Said]:
    """Continuations of a prompt by every surface that continues prompts."""
    shared: Asked = {"seed": seed, "max_tokens": max_tokens}
    [choice] = replied(rest, REST, {"prompt": prompt, "return_token_ids": True, **shared})["choices"]
    with Client(grpc) as client:
        answer = client.generate(prompt, seed=seed, max_tokens=max_tokens, timeout_s=TIMEOUT_S).result()
    words = ("--seed", str(seed), "--max-tokens", str(max_tokens), "--address", grpc)
    return {
        REST: Said(choice["text"], tuple(choice["token_ids"])),
        GRPC: Said(answer.text, answer.token_ids),
        "outrider generate": by_command("", "generate", prompt, *words),
        PAGE: by_page(rest, {"prompt": prompt, **shared}),
    }


def conversed(rest: str, grpc: str, question: str, seed: int, max_tokens: int) -> dict[str, Said]:
    """Answers to a question by every surface that talks."""
    messages = [{"role": "user", "content": question}]
    shared: Asked = {"messages": messages, "seed": seed, "max_tokens": max_tokens}
    [choice] = replied(rest, CHAT, {**shared, "return_token_ids": True})["choices"]
    [item] = replied(rest, RESPONSES, {"input": question, "seed": seed, "max_output_tokens": max_tokens})["output"]
    with Client(grpc) as client:
        answer = client.chat(messages, seed=seed, max_tokens=max_tokens, timeout_s=TIMEOUT_S).result()
    words = ("--seed", str(seed), "--max-tokens", str(max_tokens), "--address", grpc)
    return {
        CHAT: Said(choice["message"]["content"], tuple(choice["token_ids"])),
        RESPONSES: Said(item["content"][0]["text"], None),
        MESSAGES: Said(replied(rest, MESSAGES, shared)["content"][0]["text"], None),
        GRPC: Said(answer.text, answer.token_ids),
        "outrider chat": by_command(f"{question}\n", "chat", *words),
        PAGE: by_page(rest, shared),
    }


def are_same(said: Mapping[str, Said]) -> bool:
    """Whether all surfaces gave one text, and those that report ids the same ones."""
    return len({each.text for each in said.values()}) == 1 == len({each.token_ids for each in said.values()} - {None})


def answers_table(rest: str, grpc: str, seed: int) -> str:
    """README's examples and questions of fact, the answer of the first surface, and whether all gave the same."""
    rows = []
    asked = [(STORY, continued, 64, ""), *((each, conversed, 128, FACTS.get(each, "")) for each in (SKY, *FACTS))]
    for text, ask, max_tokens, expected in asked:
        said = ask(rest, grpc, text, seed, max_tokens)
        first = next(iter(said.values())).text
        found = ("yes" if expected in first else "no") if expected else ""
        rows.append([text, " ".join(first.split()), "yes" if are_same(said) else "no", ", ".join(said), found])
    return markdown(["asked", "answer", "the same", "doors", "right"], rows)


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
    """Prints the measured times of each surface, or with --answers the answers themselves."""
    parser = argparse.ArgumentParser(prog="python -m bench.surfaces", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1], help="checkout to serve")
    parser.add_argument("--rest", help="where a running gateway serves REST, as HOST:PORT")
    parser.add_argument("--grpc", help="and where it serves gRPC")
    parser.add_argument("--turns", type=int, default=60, help="answers of each surface")
    parser.add_argument("--tokens", type=int, default=48, help="tokens an answer")
    parser.add_argument("--draft-count", type=int, default=4, help="draft tokens a round")
    parser.add_argument("--answers", action="store_true", help="print answers by every door instead of times")
    parser.add_argument("--seed", type=int, default=1, help="of those answers")
    given = parser.parse_args()
    if (given.rest is None) != (given.grpc is None):
        parser.error("--rest and --grpc name one gateway: give both or neither")
    with ExitStack() as stack:
        if given.rest is None:
            event = stack.enter_context(serving(given.root.resolve(), []))
            given.rest, given.grpc = event["rest"], event["gateway"]
        if given.answers:
            print(f"Seed {given.seed}.\n\n{answers_table(given.rest, given.grpc, given.seed)}")
            return
        found = measure(given.rest, given.grpc, given.turns, given.tokens, given.draft_count)
    print(f"{machine()}; {given.turns} answers of {given.tokens} tokens, K = {given.draft_count};")
    print(f"commit {revision() or 'unknown'}.\n\n{render(*found)}")


if __name__ == "__main__":
    main()
