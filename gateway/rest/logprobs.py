"""Log-probabilities in the two shapes of OpenAI's protocol. Knows no route and no stream.

They are the log-softmax of the target's raw logits, before any transform of the request.
"""

from collections.abc import Sequence
from itertools import accumulate

from gateway.generation.transcript import GeneratedToken, PromptToken
from gateway.rest.responses import ChatLogprobs, ChatTokenLogprob, TextLogprobs, TopLogprob
from gateway.text.tokenizer import Tokenizer
from outrider.errors import ProtocolViolation
from outrider.parameters import TokenLogprob


def chat_logprobs(tokens: Sequence[GeneratedToken], tokenizer: Tokenizer) -> ChatLogprobs:
    """The shape of chat: an entry a token, each with its bytes, because a token may be half a character."""
    return ChatLogprobs(content=[_chat_token(token, tokenizer) for token in tokens], refusal=None)


def text_logprobs(tokens: Sequence[GeneratedToken | PromptToken], tokenizer: Tokenizer, start: int) -> TextLogprobs:
    """The older shape: a list for each fact. `start` is where in the text the first token's own text begins."""
    offsets = accumulate((len(token.text) for token in tokens), initial=start)
    logprobs = [token.logprob for token in tokens]
    return TextLogprobs(
        tokens=[tokenizer.piece(token.token_id).text for token in tokens],
        token_logprobs=[None if each is None else each.logprob for each in logprobs],
        top_logprobs=[None if token.logprob is None else _alternatives(token, tokenizer) for token in tokens],
        text_offset=[offset for offset, _ in zip(offsets, tokens, strict=False)],
    )


def _chat_token(token: GeneratedToken, tokenizer: Tokenizer) -> ChatTokenLogprob:
    own = _own(token)
    top = zip(own.top_token_ids, own.top_logprobs, strict=True)
    return ChatTokenLogprob(
        **_told(token.token_id, own.logprob, tokenizer).model_dump(),
        top_logprobs=[_told(token_id, logprob, tokenizer) for token_id, logprob in top],
    )


def _told(token_id: int, logprob: float, tokenizer: Tokenizer) -> TopLogprob:
    piece = tokenizer.piece(token_id)
    return TopLogprob(token=piece.text, logprob=logprob, bytes=list(piece.raw))


def _alternatives(token: GeneratedToken | PromptToken, tokenizer: Tokenizer) -> dict[str, float]:
    """The most probable tokens and the token itself. Of tokens that look alike the most probable stands."""
    own = _own(token)
    found: dict[str, float] = {}
    for token_id, logprob in (*zip(own.top_token_ids, own.top_logprobs, strict=True), (token.token_id, own.logprob)):
        found.setdefault(tokenizer.piece(token_id).text, logprob)
    return found


def _own(token: GeneratedToken | PromptToken) -> TokenLogprob:
    if token.logprob is None:
        raise ProtocolViolation(f"no log-probability came for token {token.token_id}")
    return token.logprob
