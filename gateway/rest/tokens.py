"""/tokenize, /detokenize and /tokenizer_info: what the model's tokenizer makes of texts, in vLLM's shapes.

Programs that score texts, lm-eval for one, need no tokenizer of their own then.
"""

import asyncio

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.responses import Response

from gateway.generation.frontend import Frontend
from gateway.generation.request import GenerationRequest
from gateway.rest.asking.chat_body import ChatRequest, DetokenizeRequest, TemplateFields, TokenizeRequest
from gateway.rest.asking.conversation import ChatPrompt, conversation
from gateway.rest.asking.request import check_model, check_prompt_len
from gateway.rest.bodies import ignored_header
from gateway.rest.errors import MissingParameter
from gateway.rest.openapi import documented
from gateway.rest.settings import RestSettings
from gateway.rest.validation import route_class
from gateway.text.chat_template import DEFAULT
from gateway.text.tokenizer import LONG_PROMPT
from outrider.errors import InvalidRequest


class TokenList(BaseModel):
    """The tokens of a text; max_model_len is null while the target is away."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str | None] | None = None


class Detokenized(BaseModel):
    """The text of tokens, with the names of special ones."""

    prompt: str


class TokenizerInfo(BaseModel):
    """What the files beside the tokenizer say of it. The class is the one that reads a tokenizer of any model."""

    tokenizer_class: str = "PreTrainedTokenizerFast"
    model_max_length: int | None
    bos_token: str | None = None
    eos_token: str | None = None
    unk_token: str | None = None
    sep_token: str | None = None
    pad_token: str | None = None
    cls_token: str | None = None
    mask_token: str | None = None
    chat_template: str | None = None


def routes(frontend: Frontend, settings: RestSettings) -> APIRouter:
    router = APIRouter(route_class=route_class(settings))
    tokenizer = frontend.backend.tokenizer
    errors = documented(400, 403, 404, 408, 413, 415, 429, 503)

    def context_len() -> int | None:
        target = frontend.backend.target.info
        return None if target is None else target.context_len

    @router.post("/tokenize", response_model=TokenList, responses=errors)
    async def tokenize(body: TokenizeRequest) -> Response:
        """The tokens of a text, or of the prompt of a conversation."""
        check_model(body.model, frontend.names)
        with frontend.admission.arrival():
            found = await _asked(body, frontend, settings)
            given, wanted = found.request.add_special_tokens, body.add_special_tokens
            ids = await tokenizer.encode(found.request.text or "", special=given if wanted is None else wanted)

            def answer() -> str:
                names = [tokenizer.name(token_id) for token_id in ids] if body.return_token_strs else None
                tokens = TokenList(count=len(ids), max_model_len=context_len(), tokens=[*ids], token_strs=names)
                return tokens.model_dump_json()

            json = answer() if len(ids) <= LONG_PROMPT else await asyncio.to_thread(answer)
        return Response(json, headers=ignored_header(found.ignored), media_type="application/json")

    @router.post("/detokenize", response_model=Detokenized, responses=errors)
    async def detokenize(body: DetokenizeRequest) -> Detokenized:
        """The text of tokens."""
        check_model(body.model, frontend.names)

        def text() -> str:
            unknown = next((token_id for token_id in {*body.tokens} if tokenizer.name(token_id) is None), None)
            if unknown is not None:
                raise InvalidRequest(f"tokens.{body.tokens.index(unknown)}", unknown, "the id of a token")
            return tokenizer.verbatim(body.tokens)

        with frontend.admission.arrival():
            return Detokenized(prompt=text() if len(body.tokens) <= LONG_PROMPT else await asyncio.to_thread(text))

    @router.get("/tokenizer_info", responses=documented())
    async def tokenizer_info() -> TokenizerInfo:
        """What clients need to know of the tokenizer."""
        files = frontend.chat_template.files
        return TokenizerInfo(
            model_max_length=context_len(), chat_template=files.templates.get(DEFAULT), **files.special_tokens
        )

    return router


async def _asked(body: TokenizeRequest, frontend: Frontend, settings: RestSettings) -> ChatPrompt:
    """The prompt of a body, and what of the body was not looked at."""
    fields = {name: getattr(body, name) for name in TemplateFields.model_fields}
    if body.messages is not None:
        if body.prompt is not None:
            raise InvalidRequest("prompt", body.prompt, "absent beside messages")
        return await conversation(ChatRequest(messages=body.messages, **fields), frontend, settings)
    if body.prompt is None:
        raise MissingParameter("prompt")
    for name, value in fields.items():
        if value is not None:
            raise InvalidRequest(name, "present", "absent without messages")
    check_prompt_len("prompt", body.prompt, settings.max_prompt_chars)
    return ChatPrompt(GenerationRequest(text=body.prompt))
