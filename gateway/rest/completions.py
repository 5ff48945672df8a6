"""POST /v1/completions: one prompt or several, as text or as token ids, and how they go on."""

from collections.abc import Sequence
from dataclasses import replace

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from gateway.generation.frontend import Frontend
from gateway.generation.request import CheckedRequest, GenerationRequest
from gateway.rest.answering import Answering, Head, Order
from gateway.rest.asks import TEXT_NAMES, ask_of, check_model, check_prompt_len
from gateway.rest.completion_request import CompletionRequest
from gateway.rest.documents import documented_answer
from gateway.rest.fields import StreamOptions
from gateway.rest.responses import TextCompletion
from gateway.rest.settings import RestSettings
from gateway.rest.text_shape import TextShape
from gateway.text.tokenizer import Tokenizer
from outrider.errors import InvalidRequest


def routes(door: Frontend, settings: RestSettings) -> APIRouter:
    """The route."""
    router, answering = APIRouter(), Answering(door, settings)

    @router.post("/v1/completions", response_model=TextCompletion, responses=documented_answer(TextCompletion))
    async def complete(body: CompletionRequest, request: Request) -> Response:
        """Goes on with each prompt; prompts have choices of their own, numbered through in order."""
        check_model(body, door.model_name)
        return await answering.answer(request, completion_order(body, door.backend.tokenizer, settings))

    return router


def completion_order(body: CompletionRequest, tokenizer: Tokenizer, settings: RestSettings) -> Order:
    """What a body asks for. Raises InvalidRequest about fields that do not go together."""
    prompts = body.prompts
    asks = _asks(body, prompts, settings)

    async def shape(head: Head, plans: Sequence[CheckedRequest]) -> TextShape:
        echo = [await _text(prompt, tokenizer) for prompt in prompts] if body.echo else []
        has_logprobs, has_ids = body.logprobs is not None, bool(body.return_token_ids)
        return TextShape(head, tokenizer, has_logprobs, has_ids, echo, plans[0].sample_count)

    return Order(asks, TEXT_NAMES, "cmpl", (body.stream_options or StreamOptions()) if body.stream else None, shape)


def _asks(
    body: CompletionRequest, prompts: Sequence[str | list[int]], settings: RestSettings
) -> Sequence[GenerationRequest]:
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidRequest("best_of", body.best_of, f"equal to n, which is {body.n or 1}")
    # The gateway echoes with log-probabilities only; without them nothing of the prompt is computed for it.
    echo = bool(body.echo) and body.logprobs is not None
    ask = replace(ask_of(body), logprob_count=body.logprobs, echo=echo)
    asks = []
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            check_prompt_len(f"prompt.{number}" if len(prompts) > 1 else "prompt", prompt, settings.max_prompt_chars)
            asks.append(replace(ask, text=prompt))
        else:
            asks.append(replace(ask, token_ids=tuple(prompt)))
    return asks


async def _text(prompt: str | list[int], tokenizer: Tokenizer) -> str:
    """A prompt as it is echoed: as it came, or as its tokens are spelled."""
    return prompt if isinstance(prompt, str) else "".join(await tokenizer.spell(prompt))
