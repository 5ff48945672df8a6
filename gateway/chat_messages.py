"""A conversation over gRPC as an ask: its messages are checked and rendered here, once. Decides nothing else."""

from dataclasses import replace

from gateway.chat_template import ChatTemplate
from gateway.generation_messages import ask_from
from gateway.requests import GenerationAsk
from outrider.errors import InvalidRequest, check_count
from outrider.v1 import generation_service_pb2 as pb

MAX_MESSAGES = 1024
# As the protocol lists them; "tool" answers calls that only some templates know.
ROLES = ("system", "developer", "user", "assistant", "tool")


async def chat_ask(request: pb.ChatRequest, template: ChatTemplate) -> GenerationAsk:
    """What the client wrote, with the conversation as its prompt.

    Raises InvalidRequest about a prompt beside the conversation, about the messages, and as `ask_from` does.
    """
    prompt = request.generation.WhichOneof("prompt")
    if prompt is not None:
        raise InvalidRequest(f"generation.{prompt}", "present", "absent, because the messages are the prompt")
    _check(request)
    ask = ask_from(request.generation)
    rendered = await template.prompt([{"role": each.role, "content": each.content} for each in request.messages])
    return replace(ask, text=rendered.text, add_special_tokens=rendered.add_special_tokens)


def _check(request: pb.ChatRequest) -> None:
    """How long a message may be is the context's to say, and how much of them fits into a request is gRPC's."""
    if not request.messages:
        raise InvalidRequest("messages", [], "at least one message")
    check_count("messages", len(request.messages), MAX_MESSAGES, "messages")
    for number, message in enumerate(request.messages):
        if message.role not in ROLES:
            raise InvalidRequest(f"messages.{number}.role", message.role, f"one of {', '.join(ROLES)}")
