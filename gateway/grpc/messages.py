"""Requests, conversations and events of a generation as messages of generation_service.proto."""

from dataclasses import asdict, replace
from typing import Any

from gateway.generation.generate import CompletionEvent, RoundEvent
from gateway.generation.request import GenerationRequest
from gateway.generation.transcript import round_facts
from gateway.rounds.round import FallbackReason, TokenOrigin
from gateway.text.chat_template import ChatTemplate
from outrider.beams import BeamSearch, EarlyStopping
from outrider.errors import InvalidRequest, check_count
from outrider.rpc import messages
from outrider.rpc.messages import RULES, acceptance_from, logprob_message, settings_message, shape_from
from outrider.v1 import generation_service_pb2 as pb

ORIGINS = {origin: pb.TokenOrigin.Value(f"TOKEN_ORIGIN_{origin.name}") for origin in TokenOrigin}
FALLBACKS = {reason.value: pb.FallbackReason.Value(f"FALLBACK_REASON_{reason.name}") for reason in FallbackReason}
EARLY_STOPPING: dict[int, EarlyStopping] = {
    pb.EARLY_STOPPING_UNSPECIFIED: "heuristic",
    pb.EARLY_STOPPING_HEURISTIC: "heuristic",
    pb.EARLY_STOPPING_FIRST: "first",
    pb.EARLY_STOPPING_NEVER: "never",
}
MAX_MESSAGES = 1024
# As the protocol lists them; "tool" answers calls that only some templates know.
ROLES = ("system", "developer", "user", "assistant", "tool")


def request_from(message: pb.GenerateRequest) -> GenerationRequest:
    """What the client wrote; raises InvalidRequest for sampling parameters, the rule and its settings."""
    speculation = message.speculation
    prompt = message.WhichOneof("prompt")
    rule, settings = speculation.rule, speculation.acceptance
    acceptance = acceptance_from(rule, settings, "speculation.rule", "speculation.acceptance.")
    return GenerationRequest(
        text=message.text if prompt == "text" else None,
        token_ids=tuple(message.token_ids.token_ids) if prompt == "token_ids" else None,
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        sampling=messages.sampling_from(message.sampling),
        seed=message.seed if message.HasField("seed") else None,
        stops=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        speculation_enabled=speculation.enabled if speculation.HasField("enabled") else True,
        draft_count=speculation.draft_count if speculation.HasField("draft_count") else None,
        acceptance=acceptance,
        drafters=_drafters(speculation),
        shape=shape_from(speculation.shape, "speculation.shape") if speculation.HasField("shape") else None,
        prediction=_prediction(message),
        logprob_count=message.logprob_count if message.HasField("logprob_count") else None,
        sample_count=message.sample_count if message.HasField("sample_count") else None,
        banned_words=tuple(message.banned_words),
        echo=message.echo,
        return_rounds=speculation.return_rounds,
        cache_salt=message.cache_salt,
        beam_search=_beams_from(message.beam_search) if message.HasField("beam_search") else None,
    )


def _drafters(speculation: pb.SpeculationSettings) -> tuple[str, ...]:
    if speculation.drafter and speculation.drafters:
        raise InvalidRequest("speculation.drafters", list(speculation.drafters), "empty beside speculation.drafter")
    return tuple(speculation.drafters) or ((speculation.drafter,) if speculation.drafter else ())


def _prediction(message: pb.GenerateRequest) -> str | tuple[int, ...] | None:
    match message.WhichOneof("prediction"):
        case "prediction_text":
            return message.prediction_text
        case "prediction_token_ids":
            return tuple(message.prediction_token_ids.token_ids)
    return None


def _beams_from(message: pb.BeamSearch) -> BeamSearch:
    if message.early_stopping not in EARLY_STOPPING:
        limit = f"one of {', '.join(dict.fromkeys(EARLY_STOPPING.values()))}"
        raise InvalidRequest("beam_search.early_stopping", message.early_stopping, limit)
    length_penalty = message.length_penalty if message.HasField("length_penalty") else 1.0
    return BeamSearch(message.width, length_penalty, EARLY_STOPPING[message.early_stopping])


async def chat_request_from(message: pb.ChatRequest, template: ChatTemplate) -> GenerationRequest:
    """What the client wrote, with the conversation as its prompt.

    Raises InvalidRequest about a prompt beside the conversation, about the messages, and as `request_from` does.
    """
    prompt = message.generation.WhichOneof("prompt")
    if prompt is not None:
        raise InvalidRequest(f"generation.{prompt}", "present", "absent, because the messages are the prompt")
    # How long a message may be is the context's to say, and how much of them fits into a request is gRPC's.
    if not message.messages:
        raise InvalidRequest("messages", [], "at least one message")
    check_count("messages", len(message.messages), MAX_MESSAGES, "messages")
    for number, each in enumerate(message.messages):
        if each.role not in ROLES:
            raise InvalidRequest(f"messages.{number}.role", each.role, f"one of {', '.join(ROLES)}")
    request = request_from(message.generation)
    rendered = await template.prompt([{"role": each.role, "content": each.content} for each in message.messages])
    return replace(request, text=rendered.text, add_special_tokens=rendered.add_special_tokens)


def event_message(event: RoundEvent | CompletionEvent) -> pb.GenerateResponse:
    """An event to send."""
    if isinstance(event, CompletionEvent):
        accepted_count, rejected_count = event.figures.prediction_counts
        completion = pb.Completion(
            finish_reason=messages.finish_reason_message(event.finish_reason),
            usage=pb.Usage(
                prompt_tokens=event.prompt_tokens,
                completion_tokens=event.completion_tokens,
                cached_prompt_tokens=event.cached_prompt_tokens,
                accepted_prediction_tokens=accepted_count,
                rejected_prediction_tokens=rejected_count,
            ),
            seed=event.seed,
            speculation=pb.SpeculationFigures(**event.figures.facts()),
            model_hash=event.model_hash,
            numerics_id=event.numerics_ids[-1],
            numerics_ids=event.numerics_ids,
            survival=pb.SurvivalFigures(target_reopens=event.target_reopens, drift_repairs=event.drift_repairs),
            text_delta=event.text_delta,
            timings=pb.Timings(first_token_us=event.first_token_us, total_us=event.total_us, queue_us=event.queue_us),
            sample_index=event.sample_index,
            rule=RULES[event.acceptance.rule],
            acceptance=settings_message(event.acceptance),
            cumulative_logprob=event.cumulative_logprob,
        )
        return pb.GenerateResponse(completion=completion)
    response = pb.GenerateResponse()
    _write_round(response.round, event)
    return response


def _write_round(message: pb.Round, event: RoundEvent) -> None:
    """Fills a new message in place, field by field, because a message that is put into another one is copied."""
    for token in event.tokens:
        each = message.tokens.add(token_id=token.token_id, origin=ORIGINS[token.origin], text=token.text)
        if token.logprob is not None:
            each.logprob.CopyFrom(logprob_message(token.logprob))
        if token.guess is not None:
            each.row, each.drafter = token.guess.row, token.guess.drafter
            if token.guess.draft_logprob is not None:
                each.draft_logprob = token.guess.draft_logprob
            if token.guess.value is not None:
                each.value = token.guess.value
    message.text_delta = "".join([token.text for token in event.tokens])
    message.sample_index = event.sample_index
    facts: dict[str, Any] = round_facts(event.committed) if event.committed is not None else {}
    facts["fallback_reason"] = FALLBACKS.get(facts.get("fallback_reason", ""))
    facts["new_numerics_id"] = event.new_numerics_id
    for name, value in facts.items():
        if value:
            setattr(message.facts, name, value)
    for prompt_token in event.prompt_tokens:
        message.prompt_tokens.add(
            token_id=prompt_token.token_id,
            text=prompt_token.text,
            logprob=None if prompt_token.logprob is None else logprob_message(prompt_token.logprob),
        )
    for rejected in event.rejected:
        message.rejected.add(token_id=rejected.token_id, text=rejected.text, **asdict(rejected.guess))
