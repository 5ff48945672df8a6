"""Requests through the gateway, as a client sees them. Knows nothing about models or services, and no protobuf."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields

from bench.samples import RequestSample, RoundSample
from outrider.client import AsyncClient, Round, Speculation
from outrider.parameters import SessionSpec

# What a sample keeps of a round's facts as it is.
FACTS = tuple(field.name for field in fields(RoundSample) if field.name not in {"num_tokens", "fallback"})


@dataclass(frozen=True, slots=True)
class Occasion:
    """Which request this is: the setting, and what it has in common with those that it is compared with."""

    setting: str
    turn: int
    prompt: int
    temperature: float

    def sample(
        self, token_ids: Sequence[int], seconds: float, first_token_s: float, rounds: Sequence[RoundSample] = ()
    ) -> RequestSample:
        """What was measured on this occasion."""
        occasion = self.setting, self.turn, self.prompt, self.temperature
        return RequestSample(*occasion, tuple(token_ids), seconds, first_token_s, tuple(rounds))


async def request(
    client: AsyncClient, occasion: Occasion, spec: SessionSpec, speculation: Speculation
) -> RequestSample:
    """Runs one request for exactly this session to its end. Raises the OutriderError that the gateway answered."""
    started, first_token_s, seconds = time.perf_counter(), 0.0, 0.0
    token_ids: list[int] = []
    rounds: list[RoundSample] = []
    stream = client.generate(
        spec.token_ids,
        max_tokens=spec.max_len - spec.prompt_len,
        seed=spec.seed,
        temperature=spec.sampling.temperature,
        ignore_eos=spec.sampling.ignore_eos,
        speculation=speculation,
    )
    async with stream:
        async for event in stream:
            seconds = time.perf_counter() - started
            if not isinstance(event, Round):
                continue
            first_token_s = first_token_s or seconds
            token_ids += [token.token_id for token in event.tokens]
            rounds.append(round_sample(event))
    return occasion.sample(token_ids, seconds, first_token_s, rounds)


def round_sample(event: Round) -> RoundSample:
    """The facts of a round."""
    facts = {name: getattr(event.facts, name) for name in FACTS}
    return RoundSample(num_tokens=len(event.tokens), fallback=bool(event.facts.fallback_reason), **facts)
