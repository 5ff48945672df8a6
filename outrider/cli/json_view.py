"""Answers as one JSON object, when everything is known. Knows no terminal."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, TextIO

from outrider.cli.asking import Ask
from outrider.client import GeneratedToken, PromptToken, Result, Round


class JsonView:
    """Keeps the events and writes one line at the end: the list `samples`, and the prompt's tokens where they came."""

    def __init__(self, output: TextIO) -> None:
        self._output = output
        self._prompt: tuple[PromptToken, ...] = ()
        self._rounds: list[Round] = []
        self._tells_rounds = False
        self._samples: list[dict[str, Any]] = []

    def begin(self, ask: Ask) -> None:
        """Takes whether rounds are wanted."""
        self._tells_rounds = bool(ask.speculation.show_rejected)

    def show(self, event: Round) -> None:
        """Keeps the round."""
        self._prompt += event.prompt
        self._rounds.append(event)

    def finish(self, result: Result) -> None:
        """Keeps what the rounds since the last result make up."""
        self._samples.append(sample_object(self._rounds, result, with_rounds=self._tells_rounds))
        self._rounds = []

    def end(self) -> None:
        """Writes the object."""
        prompt = {"prompt": [_token(each) for each in self._prompt]} if self._prompt else {}
        self._output.write(json.dumps({**prompt, "samples": self._samples}, ensure_ascii=False) + "\n")
        self._output.flush()

    def interrupt(self) -> None:
        """Writes nothing: half an object is none."""


def sample_object(rounds: Sequence[Round], result: Result, *, with_rounds: bool = False) -> dict[str, Any]:
    """One answer. Its tokens are told one by one only with log-probabilities, its rounds only when they are wanted."""
    tokens = [token for event in rounds for token in event.tokens]
    logprobs = {"tokens": [_token(each) for each in tokens]} if any(each.logprob for each in tokens) else {}
    told = {"rounds": [_round(each) for each in rounds]} if with_rounds else {}
    return {
        "text": "".join(event.text for event in rounds) + result.rest,
        "token_ids": [token.token_id for token in tokens],
        **logprobs,
        "finish_reason": result.finish_reason,
        "seed": result.seed,
        "rule": result.acceptance.rule,
        **result.acceptance.settings,
        "follows_target": result.acceptance.rule.is_exact,
        "usage": {
            "prompt_tokens": result.prompt_tokens,
            "cached_prompt_tokens": result.cached_prompt_tokens,
            "completion_tokens": result.completion_tokens,
        },
        "speculation": asdict(result.speculation),
        "timings": {
            "queue_us": result.queue_us,
            "first_token_us": result.first_token_us,
            "total_us": result.total_us,
        },
        "model_hash": result.model_hash,
        "numerics_id": result.numerics_ids[-1],
        "numerics_ids": result.numerics_ids,
        "survival": {"target_reopens": result.target_reopens, "drift_repairs": result.drift_repairs},
        **told,
    }


def _round(event: Round) -> dict[str, Any]:
    """One round: who said its tokens first, which guesses were not kept, and how it came about."""
    return {
        "tokens": [
            {"token_id": each.token_id, "text": each.text, "origin": each.origin, "draft_logprob": each.draft_logprob}
            for each in event.tokens
        ],
        "rejected": [asdict(each) for each in event.rejected],
        "facts": asdict(event.facts),
    }


def _token(token: PromptToken | GeneratedToken) -> dict[str, Any]:
    """A token with its log-probability, null for the prompt's first, and the most probable ones in its place."""
    told = token.logprob
    alternatives = zip(told.top_token_ids, told.top_logprobs, strict=True) if told else ()
    return {
        "token_id": token.token_id,
        "text": token.text,
        "logprob": told.logprob if told else None,
        "most_probable": [{"token_id": token_id, "logprob": value} for token_id, value in alternatives],
    }
