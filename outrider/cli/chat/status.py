"""The line of figures under an answer. Pure: is told the time."""

from dataclasses import dataclass

from outrider.cli.output import rule_told
from outrider.client import Event, Result, Round, Rule


@dataclass(slots=True)
class Progress:
    """What is known while an answer comes; times are seconds since it was asked for."""

    seed: int
    tokens: int = 0
    accepted: int = 0
    evaluated: int = 0
    first_token_s: float | None = None
    now_s: float = 0.0

    def add(self, event: Event, now_s: float) -> None:
        """Takes an event that came at a time."""
        self.now_s = now_s
        if isinstance(event, Round) and event.tokens:
            self.first_token_s = now_s if self.first_token_s is None else self.first_token_s
            self.tokens += len(event.tokens)
            self.accepted += event.facts.accepted_count
            self.evaluated += event.facts.evaluated_count

    def line(self, now_s: float) -> str:
        """The figures so far."""
        if self.first_token_s is None:
            return f"waiting for the first token, {now_s:.1f} s"
        parts = [f"{self.tokens} tokens", f"first token {_ms(self.first_token_s)}"]
        if self.evaluated:
            parts.append(f"acceptance rate {self.accepted / self.evaluated:.2f}")
        return ", ".join([*parts, f"seed {self.seed}"])


def result_line(result: Result) -> str:
    """The figures of a whole answer. The time to the first token is the gateway's, without the way to it."""
    told = result.speculation
    parts = [
        f"{result.completion_tokens} tokens",
        f"{result.tokens_per_second:.0f} tokens/s",
        f"first token {_ms(result.first_token_us / 1e6)}",
        f"cached {result.cached_prompt_tokens} of {result.prompt_tokens} prompt tokens",
        f"acceptance rate {told.acceptance_rate:.2f}",
        f"seed {result.seed}",
    ]
    if result.acceptance.rule is not Rule.MATCH:
        parts.append(rule_told(result.acceptance))
    if result.finish_reason == "length":
        parts.append("ended at the length limit")
    return ", ".join(parts)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"
