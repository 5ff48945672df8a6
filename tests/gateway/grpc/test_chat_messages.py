"""Conversations over gRPC: what is asked of the generation, and which field an error names."""

import pytest

from gateway.grpc.messages import MAX_MESSAGES, chat_request_from, request_from
from gateway.text.chat_template import ChatTemplate, TemplateFiles
from outrider.errors import InvalidRequest
from outrider.v1 import generation_service_pb2 as pb
from outrider.v1 import types_pb2

PLAIN = ChatTemplate()
STRICT = ChatTemplate(TemplateFiles({"default": "{{ raise_exception('Not you, ' ~ messages[-1].role) }}"}))
USER = pb.ChatMessage(role="user", content="Who?")


async def test_the_conversation_is_the_prompt_and_all_else_is_as_in_generate() -> None:
    """Rendered, with special tokens as the template wants them."""
    generation = pb.GenerateRequest(max_tokens=7, seed=3, stop=["."], speculation=pb.SpeculationSettings(draft_count=2))
    message = pb.ChatRequest(messages=[pb.ChatMessage(role="system", content="Be brief."), USER], generation=generation)
    request = await chat_request_from(message, PLAIN)
    assert (request.text, request.add_special_tokens) == ("System: Be brief.\n\nUser: Who?\n\nAssistant:", True)
    template = ChatTemplate(TemplateFiles({"default": "{{ messages[1].content }}"}))
    templated = await chat_request_from(message, template)
    assert (templated.text, templated.add_special_tokens) == ("Who?", False)
    generation.text = request.text or ""
    assert request == request_from(generation)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.ChatRequest(), "messages"),
        (pb.ChatRequest(messages=[USER] * (MAX_MESSAGES + 1)), "messages"),
        (pb.ChatRequest(messages=[USER, USER, pb.ChatMessage(role="User", content="x")]), "messages.2.role"),
        (pb.ChatRequest(messages=[pb.ChatMessage(content="x")]), "messages.0.role"),
        (pb.ChatRequest(messages=[USER], generation=pb.GenerateRequest(text="x")), "generation.text"),
        (
            pb.ChatRequest(messages=[USER], generation=pb.GenerateRequest(token_ids=types_pb2.TokenIds())),
            "generation.token_ids",
        ),
        (
            pb.ChatRequest(
                messages=[USER],
                generation=pb.GenerateRequest(sampling=types_pb2.SamplingParameters(temperature=-1)),
            ),
            "sampling.temperature",
        ),
    ],
)
async def test_errors_name_the_field(message: pb.ChatRequest, field: str) -> None:
    """Before anything is rendered."""
    with pytest.raises(InvalidRequest) as caught:
        await chat_request_from(message, STRICT)
    assert caught.value.metadata["field"] == field


async def test_a_template_s_own_objection_comes_through() -> None:
    """Word for word."""
    with pytest.raises(InvalidRequest, match=r"which says: Not you, user$"):
        await chat_request_from(pb.ChatRequest(messages=[USER]), STRICT)
    assert (await chat_request_from(pb.ChatRequest(messages=[USER] * MAX_MESSAGES), PLAIN)).text
