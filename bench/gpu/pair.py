"""Section `pair`: a target and a draft in one process, without messages: plain decoding, chains and trees of guesses.

The sessions, the verifier and the draft are those of the target service; only the thread between them is left out.
"""

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from bench.gpu.records import Recorder
from bench.gpu.sizes import Sizes
from bench.gpu.subjects import load, variants
from bench.gpu.timing import synchronize
from gateway.text.tokenizer import Tokenizer
from outrider.cli.bench.common import fresh_prompt, spec_of
from outrider.drafters.drafter import NO_GUESSES, Drafter, GuessLimits
from outrider.drafters.hosted import HostedModel
from outrider.engine.runner import ModelRunner
from outrider.model_service.leases import LeaseTable
from outrider.model_service.outbox import Outbox, SessionAnswer
from outrider.parameters import SessionSpec
from outrider.rpc.fencing import Fence
from outrider.token_tree import EMPTY, TreeShape
from target_service.acceptance import TargetVerdict
from target_service.sessions import TargetSessions
from target_service.states import Step, TargetState
from target_service.verifier import TargetTask, Verifier

PLAIN = "plain"
SETTINGS = {
    PLAIN: NO_GUESSES,
    "chain of 5": GuessLimits(5),
    "tree of 31": GuessLimits(31, TreeShape(max_depth=6), 6),
}
LEASE_S = 600.0


class Inbox(list[SessionAnswer[TargetVerdict]]):
    """Stands where the outbox of a link stands, in the same thread."""

    client = ""
    __hash__ = object.__hash__  # type: ignore[assignment]

    def put(self, answer: SessionAnswer[TargetVerdict]) -> None:
        """Takes an answer."""
        self.append(answer)


@dataclass(slots=True)
class Answered:
    """Tokens of some requests, in their order; and what was said while all of them were being answered."""

    texts: list[list[int]]
    reading_s: float = 0.0
    """Until each had its first token."""
    seconds: float = 0.0
    """From then until the first of them ended."""
    num_tokens: int = 0
    verdicts: int = 0


class InProcessPair:
    """A target whose sessions advance side by side, each with the drafter or without."""

    def __init__(self, target: ModelRunner, drafter: Drafter[Any]) -> None:
        self._tasks: list[TargetTask] = []
        self._table = LeaseTable[TargetState](LEASE_S)
        self._sessions = TargetSessions(target, self._table, self._tasks.append, prefix_cache=False, drafters=[drafter])
        self._verifier = Verifier(target, self._table)
        self._target, self._drafter = target, drafter

    def answer(self, specs: Sequence[SessionSpec], limits: GuessLimits) -> Answered:
        """Answers requests at once, asking each time as a gateway does; none goes on before each has its first token.

        Raises what a session ends with.
        """
        inbox = Inbox()
        owner = cast("Outbox", inbox)
        numbers = {os.urandom(16): number for number in range(len(specs))}
        answered = Answered([[] for _ in specs])
        drafter = self._drafter.name if limits.draft_count else ""
        synchronize(self._target.device)
        start = time.perf_counter()
        for session_id, spec in zip(numbers, specs, strict=True):
            step = Step(EMPTY, 0, time.perf_counter_ns(), limits)
            self._sessions.open(Fence(session_id, 1, len(spec.token_ids)), spec, step, owner, drafter)
        held: list[bytes] = []
        has_ended = False
        while self._tasks:
            self._verifier.advance(self._tasks)
            self._tasks[:] = [task for task in self._tasks if not (task.done or task.stopped)]
            answers, inbox[:] = list(inbox), []
            for answer in answers:
                if answer.error is not None or answer.content is None:
                    raise answer.error or RuntimeError(f"a session wants tokens: {answer}")
                answered.texts[numbers[answer.fence.session_id]] += answer.content.token_ids
                if answer.content.finish_reason is None:
                    held.append(answer.fence.session_id)
                has_ended |= answer.content.finish_reason is not None
            now_s = time.perf_counter() - start
            if answered.reading_s and not has_ended:
                answered.seconds = now_s - answered.reading_s
                answered.verdicts += len(answers)
                answered.num_tokens += sum(len(answer.content.token_ids) for answer in answers if answer.content)
            if answered.reading_s or all(answered.texts):
                answered.reading_s = answered.reading_s or now_s
                for session_id in held:
                    number = numbers[session_id]
                    fence = Fence(session_id, 1, len(specs[number].token_ids) + len(answered.texts[number]))
                    self._sessions.step(fence, Step(EMPTY, 0, time.perf_counter_ns(), limits), owner)
                held.clear()
        self._table.clear()
        return answered


def run(recorder: Recorder, sizes: Sizes, device: torch.device) -> None:
    """The last variant, which is the fastest that there is."""
    variant = variants(device)[-1]
    with recorder.case(variant.name):
        target, draft = (load(name, sizes.pair_tokens, device, variant) for name in sizes.pair)
        pair = InProcessPair(target, HostedModel(draft))
        prompts = asyncio.run(_encoded(sizes.pair[0], max(*sizes.streams, sizes.compared)))
        _compare(recorder, sizes, pair, prompts, variant.name)
        for streams in sizes.streams:
            for setting, limits in SETTINGS.items():
                if limits.shape is not None and streams > sizes.tree_streams:
                    continue
                with recorder.case(f"{setting}/streams={streams}/{variant.name}"):
                    specs = [spec_of(prompt, 1, 0.0, sizes.tokens) for prompt in prompts[:streams]]
                    # What is recorded or compiled for so many rows is none of the answers' business.
                    pair.answer([replace(spec, max_len=spec.max_len - sizes.tokens // 2) for spec in specs], limits)
                    answered = pair.answer(specs, limits)
                    what = f"{setting}/streams={streams}"
                    rate = answered.num_tokens / answered.seconds
                    reading_ms = answered.reading_s * 1e3
                    recorder.add(f"tokens a second/{what}/{variant.name}", rate, "tok/s", reading_ms=reading_ms)
                    mean = answered.num_tokens / answered.verdicts
                    recorder.add(f"tokens a verdict/{what}/{variant.name}", mean, "tokens")


def _compare(
    recorder: Recorder, sizes: Sizes, pair: InProcessPair, prompts: Sequence[Sequence[int]], name: str
) -> None:
    """Texts without guesses, all side by side, against those with them, few side by side; greedy and drawn."""
    for temperature in (0.0, 1.0):
        specs = [
            spec_of(prompt, seed, temperature, sizes.tokens) for seed, prompt in enumerate(prompts[: sizes.compared])
        ]
        plain = pair.answer(specs, NO_GUESSES).texts
        for setting, limits in SETTINGS.items():
            few = max(sizes.compared // 5, 1)
            parts = [specs[first : first + few] for first in range(0, len(specs), few)]
            texts = [text for part in parts for text in pair.answer(part, limits).texts]
            differing = [number for number, (one, two) in enumerate(zip(plain, texts, strict=True)) if one != two]
            what = f"texts that differ/{setting}/temperature={temperature:g}/{name}"
            recorder.add(what, len(differing), "texts", of=len(specs), differing=differing)


async def _encoded(model: str, count: int) -> list[list[int]]:
    tokenizer = Tokenizer(model)
    return [list(await tokenizer.encode(fresh_prompt(number))) for number in range(count)]
