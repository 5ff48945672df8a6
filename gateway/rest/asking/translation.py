"""Translation of a dialect's body to that of /v1/chat/completions, which is the one inner form of a conversation.

A translation knows where each of its parts comes from, so that an error about one is reported in the dialect's own
names.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, TypeAlias
from urllib.parse import quote

from pydantic import BaseModel, Field, ValidationError

from gateway.generation.frontend import Frontend
from gateway.rest.asking.chat_body import ChatRequest
from gateway.rest.asking.conversation import ChatPrompt, conversation
from gateway.rest.asking.fields import Seed, SpeculationFields
from gateway.rest.asking.request import CHAT_NAMES, in_names_of, renamed
from gateway.rest.settings import RestSettings
from gateway.rest.validation import error_about
from outrider.errors import OutriderError
from outrider.parameters import Finite, Parameters

Values: TypeAlias = dict[str, Any]
MAX_TYPE_LEN = 64


class DialectFields(Parameters):
    """How to generate, as all dialects say it; `seed`, `cache_salt` and `speculation` are ours."""

    stream: bool | None = None
    temperature: Annotated[Finite, Field(ge=0, le=100)] | None = None
    top_p: Annotated[Finite, Field(gt=0, le=1)] | None = None
    seed: Seed | None = None
    cache_salt: str | None = None
    speculation: SpeculationFields | None = None


# Those that chat calls the same.
SHARED = {"model", "temperature", "top_p", "seed", "cache_salt", "speculation", "store"}


@dataclass(slots=True)
class MessageInPieces:
    """A message of chat in pieces; joined one by one, thousands would take seconds."""

    role: str
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[Values] = field(default_factory=list)
    tool_call_id: str | None = None

    @property
    def finished(self) -> Values:
        """The message; one in which the assistant only thought says nothing."""
        message: Values = {"role": self.role}
        if self.thoughts:
            message["reasoning_content"] = "".join(self.thoughts)
        if self.texts or not self.calls:
            message["content"] = ("\n\n" if self.role == "system" else "\n").join(self.texts)
        if self.calls:
            message["tool_calls"] = self.calls
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


@dataclass(slots=True)
class ChatMessages:
    """The messages of chat, put together piece by piece such that strict templates take them: one system message, the
    first, and user and assistant in turn. `names` has the place in the body that each comes from.
    """

    messages: list[MessageInPieces] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    has_answers: bool = False

    @property
    def finished(self) -> list[Values]:
        """All messages as a chat body has them."""
        return [message.finished for message in self.messages]

    def rule(self, text: str, origin: str) -> None:
        """Adds a system prompt. All of it before the assistant's first turn is one message, the first; what the
        template does with a later one is its own to say.
        """
        if not text:
            return
        if self.has_answers:
            if self.messages[-1].role != "system":
                self._begin("system", origin)
            self.messages[-1].texts.append(text)
            return
        if not self.messages or self.messages[0].role != "system":
            later = {f"messages.{n + 1}": self.names[f"messages.{n}"] for n in range(len(self.messages))}
            self.names = {"messages.0": origin, **later}
            self.messages.insert(0, MessageInPieces("system"))
        self.messages[0].texts.append(text)

    def ask(self, text: str, origin: str) -> None:
        """Adds text of the user."""
        if not self.messages or self.messages[-1].role != "user":
            self._begin("user", origin)
        self.messages[-1].texts.append(text)

    def answer(self, call_id: str | None, text: str, origin: str) -> None:
        """Adds the result of a call, of the next one without an id."""
        message = self._begin("tool", origin)
        message.texts, message.tool_call_id = [text], call_id

    def think(self, text: str, origin: str) -> None:
        """Adds reasoning of the assistant, before it says or calls anything."""
        turn = self._assistant(origin)
        if turn.texts or turn.calls:
            turn = self._begin("assistant", origin)
        turn.thoughts.append(text)

    def say(self, text: str, origin: str) -> None:
        """Adds text of the assistant, before it calls anything."""
        turn = self._assistant(origin)
        if turn.calls:
            turn = self._begin("assistant", origin)
        turn.texts.append(text)

    def call(self, call_id: str | None, name: str, arguments: str, origin: str) -> None:
        """Adds a call of the assistant."""
        turn = self._assistant(origin)
        place = f"messages.{len(self.messages) - 1}.tool_calls.{len(turn.calls)}"
        self.names |= {place: origin, f"{place}.function": origin}
        function = {"name": name, "arguments": arguments}
        turn.calls.append({"id": call_id, "type": "function", "function": function})

    def _assistant(self, origin: str) -> MessageInPieces:
        """The assistant's turn that goes on, else a new one."""
        if self.messages and self.messages[-1].role == "assistant":
            return self.messages[-1]
        return self._begin("assistant", origin)

    def _begin(self, role: str, origin: str) -> MessageInPieces:
        self.names[f"messages.{len(self.messages)}"] = origin
        self.messages.append(MessageInPieces(role))
        self.has_answers = self.has_answers or role == "assistant"
        return self.messages[-1]


@dataclass(frozen=True, slots=True)
class Translation:
    """A body as one of chat; the places in the dialect's body by those in chat's; and what had no effect."""

    chat: Values
    names: Mapping[str, str]
    ignored: Sequence[str]

    @property
    def gateway_names(self) -> dict[str, str]:
        """The dialect's names of the gateway's own."""
        inner = {name: self.names.get(chat, chat) for name, chat in CHAT_NAMES.items()}
        return {**inner, **self.names}

    async def asked(self, frontend: Frontend, settings: RestSettings) -> ChatPrompt:
        """Request that the body makes of the gateway; max_tokens may be more than fits, and absent for all that does.

        Raises what chat raises, in the dialect's names.
        """
        try:
            try:
                body = ChatRequest.model_validate(self.chat)
            except ValidationError as error:
                raise error_about(error.errors(), self.chat) from None
            asked = await conversation(body, frontend, settings)
            ignored = (*self.ignored, *(renamed(self.names, name) for name in asked.ignored))
            return ChatPrompt(replace(asked.request, up_to_context=True), tuple(dict.fromkeys(ignored)))
        except OutriderError as error:
            raise in_names_of(self.names, error) from None


def tools_of(
    given: Iterable[tuple[int, BaseModel | Mapping[str, Any]]], function: Callable[[Any], Values], schema_name: str
) -> tuple[list[Values], dict[str, str], list[str]]:
    """The tools of chat, their names of places, and what was left out: those of a type that is none of ours, which
    come as mappings.
    """
    tools: list[Values] = []
    names: dict[str, str] = {}
    skipped = []
    for number, tool in given:
        if isinstance(tool, Mapping):
            skipped.append(f"tools.{number}={quote(str(tool['type'])[:MAX_TYPE_LEN], safe='')}")
            continue
        inner, outer = f"tools.{len(tools)}", f"tools.{number}"
        names |= {inner: outer, f"{inner}.function": outer, f"{inner}.function.parameters": f"{outer}.{schema_name}"}
        tools.append({"type": "function", "function": function(tool)})
    return tools, names, skipped


def shared_values(body: BaseModel) -> Values:
    """The fields that chat calls the same."""
    return body.model_dump(include=SHARED, exclude_none=True)
