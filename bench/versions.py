"""This checkout against another one, interleaved in one run: milliseconds a token, starts and imports. No gate.

    python -m bench.versions --old DIR [--target MODEL] [--turns 12] [--tokens 64] [--starts 5]

Both serve the same pair side by side, and each request goes to one and then to the other, in turns, so that whatever
else the machine does meets both. Tokens are compared on the way. Ratios are of times: below 1 this checkout is faster.
"""

import argparse
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

from bench.house.stack import environment, outrider, serving
from outrider.cli.bench.common import OPENINGS, TokensDiffer, machine, markdown, revision, settings_of, spread
from outrider.client import Client, Round

TIMEOUT_S = 120.0
SETTINGS = settings_of((0, 2, 4, None))
TEMPERATURES = (0.0, 0.8)
NEUTRAL: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
PROGRAMS = ("gateway", "target_service", "draft_service")

Times = dict[str, dict[str, list[float]]]
"""Milliseconds of what was done, by checkout."""


def in_turns(names: Iterable[str], turn: int) -> list[str]:
    """The checkouts in another order each turn."""
    return sorted(names, reverse=turn % 2 == 1)


def compare(answers: Mapping[str, Sequence[int]], asked: str) -> None:
    """Raises TokensDiffer unless all checkouts gave the same tokens."""
    if len({tuple(each) for each in answers.values()}) > 1:
        raise TokensDiffer(f"{asked}: {'; '.join(f'{name} said {list(each)}' for name, each in answers.items())}")


def answer(client: Client, prompt: str, temperature: float, setting: str, tokens: int) -> tuple[float, list[int]]:
    """Milliseconds a token after the first round, and all tokens."""
    stream = client.generate(
        prompt,
        seed=1,
        temperature=temperature,
        # Named, because what a model recommends is not every version's default.
        **NEUTRAL,
        max_tokens=tokens,
        ignore_eos=True,
        speculation=SETTINGS[setting],
        timeout_s=TIMEOUT_S,
    )
    rounds = [(time.perf_counter(), event.tokens) for event in stream if isinstance(event, Round)]
    token_ids = [token.token_id for _, tokens in rounds for token in tokens]
    (first_s, first_tokens), (last_s, _) = rounds[0], rounds[-1]
    return 1e3 * (last_s - first_s) / (len(token_ids) - len(first_tokens)), token_ids


def measure_answers(roots: Mapping[str, Path], options: Sequence[str], turns: int, tokens: int) -> Times:
    """Milliseconds a token by setting. Raises TokensDiffer."""
    found: Times = defaultdict(lambda: defaultdict(list))
    with ExitStack() as stack:
        events = {name: stack.enter_context(serving(root, options)) for name, root in roots.items()}
        clients = {name: stack.enter_context(Client(event["gateway"])) for name, event in events.items()}
        # The first turn is to warm up.
        for turn, (temperature, setting) in product(range(turns + 1), product(TEMPERATURES, SETTINGS)):
            prompt, what = OPENINGS[turn % len(OPENINGS)], f"{setting}, temperature {temperature:g}"
            answers = {}
            for name in in_turns(clients, turn):
                taken_ms, answers[name] = answer(clients[name], prompt, temperature, setting, tokens)
                if turn:
                    found[what][name].append(taken_ms)
            compare(answers, f"{prompt!r}, {what}")
    return found


def measure_starts(roots: Mapping[str, Path], options: Sequence[str], turns: int) -> Times:
    """Milliseconds until everything serves, until the command line printed its version, and of imports."""
    found: Times = defaultdict(lambda: defaultdict(list))
    imports = {f"{name} --help": [sys.executable, "-P", "-m", name, "--help"] for name in PROGRAMS}
    for turn in range(turns):
        for name in in_turns(roots, turn):
            started_s = time.perf_counter()
            with serving(roots[name], options):
                found["start of the stack"][name].append(1e3 * (time.perf_counter() - started_s))
            for what, command in {"outrider version": [*outrider(roots[name]), "version"], **imports}.items():
                started_s = time.perf_counter()
                subprocess.run(command, env=environment(roots[name]), check=True, stdout=subprocess.DEVNULL)
                found[what][name].append(1e3 * (time.perf_counter() - started_s))
    return found


def render(found: Times, unit: str, form: str) -> str:
    """Old, new, and the ratios of neighbours, with quartiles."""
    rows = []
    for what, times in found.items():
        ratios = spread(new / old for old, new in zip(times["old"], times["new"], strict=True))
        rows.append([what, spread(times["old"]).show(form), spread(times["new"]).show(form), ratios.show(".3f")])
    return markdown(["median (quartiles)", f"old, {unit}", f"new, {unit}", "new over old"], rows)


def main() -> None:
    """Prints tables of both checkouts' answers and starts."""
    parser = argparse.ArgumentParser(prog="python -m bench.versions", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--old", type=Path, required=True, help="the other checkout, with its kernels built")
    parser.add_argument("--target", help="target of both, for instance sized:200m; default: the embedded pair")
    parser.add_argument("--turns", type=int, default=12, help="requests of each setting and checkout")
    parser.add_argument("--tokens", type=int, default=64, help="tokens a request")
    parser.add_argument("--starts", type=int, default=5, help="starts of each checkout; 0 for none")
    given = parser.parse_args()
    roots = {"old": given.old.resolve(), "new": Path(__file__).resolve().parents[1]}
    options = ["--target", given.target] if given.target else []
    print(f"{given.target or 'embedded pair'}; {machine()}; {given.turns} requests of {given.tokens} tokens a setting;")
    print(f"commit {revision() or 'unknown'}.\n")
    print(render(measure_answers(roots, options, given.turns, given.tokens), "ms a token", ".3f"))
    if given.starts:
        print(f"\n{render(measure_starts(roots, options, given.starts), 'ms', '.0f')}")


if __name__ == "__main__":
    main()
