"""The page at `/`, its files, and what it calls: /page/generate, a stream of typed events, and /page/status.

The files are read once: what is served cannot leave gateway/web, and an edit shows after a restart. The events are
`waiting`, `opened`, `reading`, `round`, `completion` and `error`, one JSON object each, with the names of
generation_service.proto; docs/page.md has their fields. /v1 has no such events, because clients of OpenAI take every
event for a chunk. Seeds are strings, because 64 bits do not fit into a number of JavaScript.
"""

import hashlib
import json
import re
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import asdict, dataclass, fields, replace
from importlib.resources import files
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BeforeValidator
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import outrider
from gateway.generation.events import CompletionEvent, GuessFacts, RoundEvent, round_facts
from gateway.generation.frontend import Frontend
from gateway.generation.request import GenerationRequest
from gateway.generation.sample import merged
from gateway.keys.door import Entrance
from gateway.rest.asking.chat_body import ChatRequest, GenerationFields, Messages, TemplateFields, ToolChoice
from gateway.rest.asking.conversation import conversation
from gateway.rest.asking.fields import Seed, Text, Unserved
from gateway.rest.asking.request import CHAT_NAMES, TEXT_NAMES, check_prompt_len, generation_request, in_names_of
from gateway.rest.bodies import ParsedBodyRoute, ignored_header
from gateway.rest.errors import MissingParameter
from gateway.rest.figures import Sampling
from gateway.rest.guard import entrance_of
from gateway.rest.settings import RestSettings
from gateway.rest.sse import EventStream, typed
from gateway.rounds.choice import Choice
from gateway.rounds.explanation import explained
from gateway.sessions.replicas import Replicas
from gateway.sessions.wait import Wait
from outrider.answer import CallArguments, CallBegun, reasoning_of
from outrider.errors import InvalidRequest, OutriderError

MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
# No inline script or style, nothing from elsewhere, no frames around it: text of a model can be nothing but text.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    # Browsers ask again, and mostly hear that nothing has changed.
    "cache-control": "no-cache",
}
NO_STORE = {"cache-control": "no-store"}
DIGITS = re.compile(r"-?[0-9]{1,19}")
VERSION = outrider.__version__
# Fields of a body that only a conversation has.
ABOUT_MESSAGES = (*TemplateFields.model_fields, "tool_choice", "parallel_tool_calls")
# What a token has in the place of a guess, when it was none or guesses are not reported.
UNGUESSED = dict.fromkeys(each.name for each in fields(GuessFacts))


@dataclass(frozen=True, slots=True)
class WebFile:
    """A file of the page; its tag is an ETag."""

    content: bytes
    media_type: str
    tag: str

    def answer(self, request: Request) -> Response:
        """The file, or that the browser has it already."""
        headers = {**HEADERS, "etag": self.tag}
        if request.headers.get("if-none-match") == self.tag:
            return Response(status_code=304, headers=headers)
        return Response(self.content, headers=headers, media_type=self.media_type)


class PageRequest(GenerationFields, TemplateFields):
    """The body of /page/generate: that of /v1 for one answer to either a prompt or a conversation. A seed may be a
    string.
    """

    prompt: Text | None = None
    messages: Messages | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    seed: Annotated[
        Seed | None,
        BeforeValidator(lambda seed: int(seed) if isinstance(seed, str) and DIGITS.fullmatch(seed) else seed),
    ] = None
    probabilities: bool = False
    """Whether tokens come with the target's log-probability."""
    explain: bool = False
    """Whether rounds come with what their number of guesses was chosen from."""
    n: Unserved = None
    use_beam_search: Unserved = None
    return_token_ids: Unserved = None
    stream: Unserved = None
    stream_options: Unserved = None


def routes(frontend: Frontend, settings: RestSettings) -> APIRouter:
    """`/`, `/static/*`, and `/page/*`, which the page uses."""
    web_files = read_files()
    router = APIRouter(route_class=ParsedBodyRoute, include_in_schema=False)

    @router.api_route("/", methods=["GET", "HEAD"])
    async def page(request: Request) -> Response:
        return web_files["index.html"].answer(request)

    @router.api_route("/static/{name:path}", methods=["GET", "HEAD"])
    async def static(name: str, request: Request) -> Response:
        found = web_files.get(name)
        if found is None:
            raise HTTPException(404)
        return found.answer(request)

    @router.post("/page/generate")
    async def generate(body: PageRequest, request: Request) -> Response:
        names, generation, ignored = await _asked(body, frontend, settings)
        generation = replace(generation, logprob_count=0 if body.probabilities else None)
        frames = event_frames(frontend, generation, names, entrance_of(request), explains=body.explain)
        stream = EventStream(frames, settings.keep_alive_s, settings.client_stall_s, ignored_header(ignored))
        await stream.begin(request.receive)
        return stream

    @router.api_route("/page/status", methods=["GET", "HEAD"])
    async def status() -> Response:
        return JSONResponse(status_view(frontend, settings.grpc_port), headers=NO_STORE)

    return router


def read_files() -> dict[str, WebFile]:
    """Files of gateway/web by their path in it."""
    found = {}
    folders = [("", files("gateway").joinpath("web"))]
    for prefix, folder in folders:
        for entry in folder.iterdir():
            media_type = MEDIA_TYPES.get(entry.name.rpartition(".")[2])
            if entry.is_dir():
                folders.append((f"{prefix}{entry.name}/", entry))
            elif media_type is not None:
                content = entry.read_bytes()
                tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
                found[prefix + entry.name] = WebFile(content, media_type, tag)
    return found


async def _asked(
    body: PageRequest, frontend: Frontend, settings: RestSettings
) -> tuple[Mapping[str, str], GenerationRequest, tuple[str, ...]]:
    """What a body asks for: the route's names of fields, the request, and what of the body was not looked at.

    Raises as `conversation` does, MissingParameter about a body without either text, and InvalidRequest about both.
    """
    if body.messages is not None:
        if body.prompt is not None:
            raise InvalidRequest("prompt", body.prompt, "absent beside messages")
        # All values are checked already.
        chat = ChatRequest.model_construct(**{name: value for name, value in body if name in ChatRequest.model_fields})
        asked = await conversation(chat, frontend, settings)
        return CHAT_NAMES, asked.request, asked.ignored
    if body.prompt is None:
        raise MissingParameter("prompt")
    for name in ABOUT_MESSAGES:
        if getattr(body, name) is not None:
            raise InvalidRequest(name, "present", "absent without messages")
    check_prompt_len("prompt", body.prompt, settings.max_prompt_chars)
    request = replace(generation_request(body, frontend.names), text=body.prompt, add_special_tokens=True)
    return TEXT_NAMES, request, ()


async def event_frames(
    frontend: Frontend,
    request: GenerationRequest,
    names: Mapping[str, str],
    enter: Entrance | None,
    *,
    explains: bool = False,
) -> AsyncGenerator[bytes, None]:
    """The events of a request. What is wrong before its first event is raised, in the route's `names` of fields; what
    goes wrong later is an event. With `explains` a round has its choice, unless it is that of the round before.
    """
    wait, has_begun = Wait(), False

    async def streams() -> AsyncGenerator[AsyncGenerator[bytes, None], None]:
        yield _waiting(wait, frontend)
        yield _generating(frontend, request, enter, wait, explains=explains)

    try:
        async with aclosing(merged(streams())) as frames:
            async for frame in frames:
                has_begun = True
                yield frame
    except OutriderError as error:
        error = in_names_of(names, error)
        if not has_begun:
            raise error from None
        view = {"reason": error.reason, "message": error.message, "metadata": error.metadata}
        yield _frame("error", view)


async def _waiting(wait: Wait, frontend: Frontend) -> AsyncGenerator[bytes, None]:
    """An event for each place in the queue that a request has, and then for each part of its prompt that is read."""
    async with aclosing(wait.changes()) as changes:
        async for _ in changes:
            if wait.place:
                admission = frontend.admission
                view = {"place": wait.place, "running": admission.running, "places": admission.places}
                yield _frame("waiting", view)
            elif wait.read_len:
                yield _frame("reading", {"read_tokens": wait.read_len})


async def _generating(
    frontend: Frontend, request: GenerationRequest, enter: Entrance | None, wait: Wait, *, explains: bool
) -> AsyncGenerator[bytes, None]:
    """The events of a request from the moment at which it has its place."""
    started_ns = time.perf_counter_ns()
    last: Choice | None = None
    async with frontend.open([request], enter, wait) as generation:
        target, checked = generation.target, generation.requests[0]
        opened = {
            "model": frontend.model_name,
            "model_hash": target.model_hash,
            "numerics_id": target.numerics_id,
            "prompt_tokens": checked.spec.prompt_len,
            "max_tokens": checked.spec.max_len - checked.spec.prompt_len,
            "seed": str(checked.spec.seed),
            "rule": checked.spec.acceptance.rule,
            "draft_count": "auto" if checked.draft_count is None else checked.draft_count,
            "sampling": Sampling.model_validate(checked.spec.sampling, from_attributes=True).model_dump(),
        }
        yield _frame("opened", opened)
        async for _, event in generation.events:
            wait.end()
            if isinstance(event, RoundEvent):
                view = _round_view(event, (time.perf_counter_ns() - started_ns) // 1000)
                # The prompt's own pass comes before any choice.
                is_first = event.committed is None or event.committed.is_first
                if explains and not is_first and event.choice is not None and event.choice is not last:
                    last, view["choice"] = event.choice, explained(event.choice)
                yield _frame("round", view)
            else:
                yield _frame("completion", _completion_view(event))


def _frame(name: str, view: dict[str, Any]) -> bytes:
    return typed(name, json.dumps(view, ensure_ascii=False, allow_nan=False))


def _round_view(event: RoundEvent, time_us: int) -> dict[str, Any]:
    """The event of a round. time_us counts from the request's arrival to the moment in which the round was ready."""
    return {
        "time_us": time_us,
        **(round_facts(event.committed) if event.committed is not None else {}),
        "draft_depth": max(event.committed.proposal.tree.depths) if event.committed is not None else 0,
        "new_numerics_id": event.new_numerics_id,
        **_apart(event),
        "tokens": [
            {
                "token_id": token.token_id,
                "text": token.text,
                "origin": token.origin.value,
                "logprob": None if token.logprob is None else token.logprob.logprob,
                **(UNGUESSED if token.guess is None else asdict(token.guess)),
            }
            for token in event.tokens
        ],
        "rejected": [
            {"token_id": token.token_id, "text": token.text, **asdict(token.guess)} for token in event.rejected
        ],
    }


def _apart(event: RoundEvent | CompletionEvent) -> dict[str, Any]:
    """New pieces of an event that are no text for the user, where there are any: reasoning, and calls of tools, each
    with its number, the first piece with its id and name and the following ones with more of the arguments.
    """
    thought = reasoning_of(event.deltas)
    calls = [asdict(delta) for delta in event.deltas if isinstance(delta, CallBegun | CallArguments)]
    return {**({"reasoning": thought} if thought else {}), **({"calls": calls} if calls else {})}


def _completion_view(event: CompletionEvent) -> dict[str, Any]:
    return {
        "finish_reason": event.finish_reason,
        "text": event.text_delta,
        **_apart(event),
        "seed": str(event.seed),
        "usage": event.section("usage"),
        "speculation": asdict(event.speculation),
        "rule": event.acceptance.rule,
        "follows_target": event.acceptance.rule.is_exact,
        "timings": event.section("timings"),
        "model_hash": event.model_hash,
        "numerics_ids": list(event.numerics_ids),
        "survival": event.section("survival"),
    }


def status_view(frontend: Frontend, grpc_port: int) -> dict[str, Any]:
    """State of the services at this moment, and what the policy knows, from what the gateway knows already."""
    target, draft = frontend.backend.target, frontend.backend.draft
    limit = frontend.backend.policies.latest.tuning.tree_counts[-1]
    limit = limit if target.info is None else min(limit, target.info.max_draft_count)
    outlook = frontend.backend.outlook(limit)
    return {
        "gateway": {
            "up": True,
            "version": VERSION,
            "model": frontend.model_name,
            "has_chat_template": not frontend.chat_template.is_default,
            "grpc_port": grpc_port,
            "started_s": int(frontend.started_s),
            "running": frontend.admission.running,
            "waiting": frontend.admission.waiting,
            "places": frontend.admission.places,
            # That a request may name.
            "drafters": [*frontend.backend.offers(target.info).names] if target.info else [],
            # What counts where a request says nothing.
            "generation_defaults": target.info.defaults.model_dump() if target.info else None,
        },
        "target": _service_view(target),
        "draft": _service_view(draft),
        "policy": {
            "draft_count": outlook["choice"]["draft_count"],
            "max_draft_count": limit,
            **outlook,
        },
    }


def _service_view(replicas: Replicas | None) -> dict[str, Any]:
    """A service, with the reason why it is not used in a few words; the gateway's log has the sentence."""
    info = None if replicas is None else replicas.info
    reason = ""
    if replicas is None:
        reason = "not configured"
    elif info is None:
        reason = "answers, but does not fit" if replicas.state == "misfit" else "does not answer"
        if any(peer.info and peer.is_draining for peer in replicas.peers):
            reason = "is stopping"
    return {
        "configured": replicas is not None,
        "up": info is not None,
        "state": "none" if replicas is None else replicas.state,
        "model": info.model_name if info else "",
        "model_hash": info.model_hash if info else "",
        "numerics_id": info.numerics_id if info else "",
        "context_len": info.context_len if info else 0,
        "max_draft_count": info.max_draft_count if info else 0,
        # Those of a target draft in its own process.
        "drafters": list(info.drafters) if info else [],
        "reason": reason,
    }
