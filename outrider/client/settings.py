"""What a request may ask for. Checks nothing: ranges and defaults are the gateway's."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

from outrider.parameters import Rule

Prompt = str | Sequence[int]
"""Text, or token ids that are taken as they are."""
Metadata = Mapping[str, str | bytes] | Iterable[tuple[str, str | bytes]]
"""What travels beside the message, for instance a `traceparent`: text of printable ASCII, and bytes under names that
end in -bin."""


class ChatMessage(TypedDict):
    """One turn of a conversation; the role is system, developer, user, assistant or tool."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Whether the draft guesses, how, and which guesses are kept; under the rule `match` nothing changes a token.

    draft_count None lets the gateway choose, and an empty drafter the draft service. lenience belongs to the rule
    `lenient`, the other two numbers to `typical`. With return_rounds each round also tells the guesses that were not
    kept, and the draft's log-probabilities.
    """

    enabled: bool = True
    draft_count: int | None = None
    rule: Rule | str | None = None
    drafter: str = ""
    lenience: float | None = None
    typical_epsilon: float | None = None
    typical_delta: float | None = None
    return_rounds: bool = False


Message = Mapping[str, object]
"""A ChatMessage, or any other mapping with its two keys."""


class GenerationOptions(TypedDict, total=False):
    """Everything but the prompt. None is the same as absent: then the gateway's default holds."""

    max_tokens: int | None
    """Most tokens to generate. Default: 128, or what the context leaves."""
    min_tokens: int | None
    """No end before so many tokens. Default: 0."""
    ignore_eos: bool | None
    """Take the end of sequence for an ordinary token."""
    temperature: float | None
    """Divisor of the logits, 0 to 100; 0 takes the most probable token. Default: 1."""
    top_k: int | None
    """Number of most probable tokens kept; 0 keeps all, which is the default."""
    top_p: float | None
    """Probability mass kept, above 0 and up to 1. Default: 1."""
    min_p: float | None
    """Least probability kept, as a share of the largest one, 0 to 1. Default: 0."""
    repetition_penalty: float | None
    """Divides the logits of tokens that occurred, above 0 and up to 100. Default: 1."""
    presence_penalty: float | None
    """Lowers the logits of tokens in the output, -2 to 2. Default: 0."""
    frequency_penalty: float | None
    """The same for each time that the token occurred."""
    logit_bias: Mapping[int, float] | None
    """Added to the logits of single tokens, -100 to 100. At most 300 entries."""
    seed: int | None
    """Seed of the noise. Default: a random one, which the result names."""
    sample_count: int | None
    """Answers, 1 to 8, each with a seed of its own. Default: 1."""
    stop: str | Sequence[str] | None
    """Texts that end the output without being part of it. At most 8."""
    stop_token_ids: Sequence[int] | None
    """Tokens that end the output and are its last. At most 64."""
    banned_words: Sequence[str] | None
    """Words that must not occur, with or without a space before them. At most 64."""
    logprob_count: int | None
    """Alternatives whose log-probabilities come with every token, 0 to 20. Default: no log-probabilities."""
    echo: bool | None
    """Whether the prompt's tokens and log-probabilities come too; needs logprob_count."""
    cache_salt: str | None
    """Only requests with the same salt share what is cached of equal beginnings of prompts."""
    speculation: Speculation | None
    """Whether and how to speculate."""
    timeout_s: float | None
    """Seconds until the call ends with TimedOut. Default: the client's, which is none."""
    metadata: Metadata | None
    """Sent beside the request, behind the client's own."""
