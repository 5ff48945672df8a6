"""The way from a conversation to a prompt, by the template that comes with the target's tokenizer.

Templates and special tokens lie beside the tokenizer, in the files and the order of precedence of transformers, or in
a GGUF file. A model without a template gets lines instead, "System: ...", "User: ..." and "Assistant: ...", with blank
lines between them and "Assistant:" at the end. Nothing hides the borders of messages there: a message can look like
several. Where there is a template, text that looks like a special token becomes one when the prompt is encoded, as
everywhere.
"""

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

import huggingface_hub

from gateway.text.history import CALLS, CONTENT, REASONING, Turns, are_shown, begun, marked, told
from gateway.text.template_sandbox import SafeTemplate, TemplateRefusal
from gateway.tools.formats import AUTO, Body, choose_format
from gateway.tools.reader import Reading
from outrider.errors import InvalidRequest, ModelRefused, Unsupported
from outrider.model_files.gguf.files import HubName
from outrider.model_files.gguf.header import GgufFile
from outrider.model_files.gguf.tokenizer import chat_templates, special_tokens
from outrider.model_files.model_names import tokenizer_source
from outrider.model_files.tokenizer_files import find_gguf

PATTERNS = ("tokenizer_config.json", "special_tokens_map.json", "*.jinja")
DEFAULT, TOOL_USE = "default", "tool_use"
SPECIAL_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


@dataclass(frozen=True, slots=True)
class TemplateFiles:
    """Sources of templates by name, none at all for many a base model, and special tokens by name."""

    templates: Mapping[str, str] = field(default_factory=dict)
    special_tokens: Mapping[str, str] = field(default_factory=dict)


def find_templates(model: str) -> TemplateFiles:
    """Chat templates of a folder, a GGUF file, a model on the hub, or the model in a sized one. Raises ModelRefused."""
    source = tokenizer_source(model)
    try:
        gguf = find_gguf(source)
        if gguf is not None:
            file = GgufFile.read(gguf)
            return TemplateFiles(chat_templates(file), special_tokens(file))
        folder = Path(source).expanduser()
        if not folder.is_dir():
            # What was downloaded once is used when there is no network.
            hub, patterns = HubName.parse(source), list(PATTERNS)
            snapshot = huggingface_hub.snapshot_download(hub.model_id, revision=hub.revision, allow_patterns=patterns)
            folder = Path(snapshot)
        config = _object(folder / "tokenizer_config.json")
        # Templates in files of their own replace those of the configuration.
        paths = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
        if (folder / "chat_template.jinja").is_file():
            paths[DEFAULT] = folder / "chat_template.jinja"
        files = {name: path.read_text(encoding="utf-8") for name, path in paths.items()}
        entry = config.get("chat_template")
        if not files and entry is not None:
            # One, or a list of named ones.
            entry = {DEFAULT: entry} if isinstance(entry, str) else entry
            if isinstance(entry, list):
                entry = {each["name"]: each["template"] for each in entry}
            if not isinstance(entry, dict) or not all(isinstance(source, str) for source in entry.values()):
                raise ValueError("chat_template of tokenizer_config.json is neither a text nor a list of named ones")
            files = entry
        return TemplateFiles(files, _special_tokens(folder, config))
    except ModelRefused:
        raise
    except Exception as error:  # the hub's library has errors of several roots
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ModelRefused(f"the chat template of {model} cannot be read: {reason}", model=model) from error


def _special_tokens(folder: Path, config: dict[str, object]) -> dict[str, str]:
    # Older tokenizers keep them in a file of their own, which newer ones may have kept.
    legacy = {} if "added_tokens_decoder" in config else _object(folder / "special_tokens_map.json")
    found = {name: legacy.get(name, config.get(name)) for name in SPECIAL_TOKENS}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in found.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _object(path: Path) -> dict[str, object]:
    if not path.is_file():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} is no JSON object")
    return found


LONG_CHAT, LONG_TEXT = 16, 4_000  # messages, and characters of them; rendering more is felt by other requests
MAX_SENTENCE_LEN = 300
SPEAKERS = {"developer": "system"}  # two names of one who sets the rules
# What a turn may have beside its content, and the lines have no place for.
TEMPLATE_ONLY = ("name", "tool_calls", "tool_call_id")
# Put after a message that the answer goes on with, to find its end in the prompt; as transformers does it.
CUT = "<|end of what is gone on with|>"
NAME_SHOWN = r"\b(m|msg|\w*message)(\.name\b|\[.name.\]|\.get\(.name.)|.name. in (m|msg|\w*message)\b"
# What a template is given besides, and functions that it has.
GIVEN = (
    *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
    *("raise_exception", "strftime_now", "namespace"),
)

Message = Mapping[str, object]
BLANKS: Sequence[Message] = ({}, {"content": None}, {"content": ""})


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt, and whether it still lacks the special tokens that the tokenizer puts around a text."""

    text: str
    add_special_tokens: bool
    begun: str = ""
    """Beginning of the answer that is in the prompt."""
    ignored: tuple[str, ...] = ()
    """Fields of chat's messages that are said otherwise in it, or not at all."""


class ChatTemplate:
    """The chat template of a model, or the plain one."""

    def __init__(self, files: TemplateFiles | None = None, model: str = "", tool_format: str = AUTO) -> None:
        """Compiles the templates; without any it is the plain one. Raises ModelRefused."""
        self.files = files = files or TemplateFiles()
        """Files that it was read from."""
        self._source = "\n".join(files.templates.values())
        patterns = {"name": NAME_SHOWN, "tool_calls": "tool_calls"}
        self._shown = {name for name, pattern in patterns.items() if re.search(pattern, self._source)}
        self.tool_format = choose_format(tool_format, self._source)
        """Format of calls of tools and reasoning; None where the gateway shall not look for them."""
        self._special_tokens = files.special_tokens
        try:
            self._templates = {name: SafeTemplate(source) for name, source in files.templates.items()}
        except Exception as error:  # the compiler has bugs of its own, and templates come from anywhere
            raise ModelRefused(f"the chat template of {model} does not compile: {error}", model=model) from error
        if self._templates and DEFAULT not in self._templates:
            names = ", ".join(self._templates)
            raise ModelRefused(f"{model} has chat templates named {names}, but no default one", model=model)

    @classmethod
    def read(cls, model: str, tool_format: str = AUTO) -> Self:
        """The template of a local folder, a model on the hub, or the one inside a sized model. Raises ModelRefused."""
        return cls(find_templates(model), model, tool_format)

    @property
    def is_default(self) -> bool:
        """Whether the model has no template of its own."""
        return not self._templates

    @property
    def renders_tools(self) -> bool:
        """Whether there is a place for tools in the prompt."""
        return TOOL_USE in self._templates or (not self.is_default and "tools" in self._templates[DEFAULT].variables)

    @property
    def variables(self) -> frozenset[str]:
        """Names that a client may set beside the conversation, because a template of the model reads them."""
        found = frozenset(name for each in self._templates.values() for name in each.variables)
        return found - {*GIVEN, *SPECIAL_TOKENS, *self._special_tokens}

    def shows(self, name: str) -> bool:
        """Whether a field of messages, `name` or `tool_calls`, can be part of a prompt."""
        # Tools have names too.
        return name in self._shown

    @property
    def shows_reasoning(self) -> bool:
        """Whether the reasoning of earlier turns can be part of a prompt."""
        return any(name in self._source for name in REASONING)

    def reading(self, prompt: str, tools: Mapping[str, Mapping[str, object]], begun: str = "") -> Reading | None:
        """How the answer to a rendered prompt is read, with the schemas of the tools that may be called, by name, and
        with what of it is in the prompt.

        None where there is nothing to look for.
        """
        if self.tool_format is None or not (tools or self.tool_format.reasoning or self.tool_format.has_channels):
            return None
        tail = prompt.rstrip()
        openers = (
            opener
            for opener, closer in self.tool_format.reasoning
            if tail.endswith(opener) or begun.rfind(opener) > begun.rfind(closer)
        )
        return Reading(self.tool_format, tools, next(openers, ""))

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, object]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: object,
    ) -> RenderedPrompt:
        """The prompt of a conversation, at whose end the assistant speaks unless add_generation_prompt is false, or
        which ends with the text of the last message when continue_final_message is true.

        Messages are those of the OpenAI protocol with the parts of their text joined; a value of None is an absent one.
        `variables` are for the template to read, and never a client's own dictionary.

        Raises InvalidRequest with the template's own sentence, or Python's, when it does not take them, or does not
        show the last message as it is, and Unsupported about what only a template could show.
        """
        if tools is not None and not self.renders_tools:
            raise Unsupported("tools is not served: the model's chat template has no place for them", field="tools")
        present = [{key: value for key, value in each.items() if value is not None} for each in messages]
        for number, message in enumerate(present):
            # Templates look for the reasoning under several names; transformers gives it two.
            reasoning = next((message[name] for name in REASONING if name in message), None)
            if reasoning is not None:
                present[number] = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        if continue_final_message:
            if "content" not in present[-1]:
                raise InvalidRequest("continue_final_message", True, "false where the last message has no content")
            present[-1] = {**present[-1], "content": f"{present[-1]['content']}{CUT} "}
        if self.is_default:
            text = _plain(present, add_generation_prompt)
        else:
            text = self._rendered(present, tools, add_generation_prompt=add_generation_prompt, **variables)
        begun = ""
        if continue_final_message:
            begun, end = str(messages[-1]["content"]), text.rfind(CUT)
            if end < 0 or begun.strip() not in text[:end]:
                limit = "false: the chat template does not show the last message as it is"
                raise InvalidRequest("continue_final_message", True, limit)
            # Where the template trimmed the message, so is the prompt's end.
            text = text[:end] if text.startswith(f"{CUT} ", end) else text[:end].rstrip()
        return RenderedPrompt(text, self.is_default, begun)

    def _rendered(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]] | None, **variables: object
    ) -> str:
        given: dict[str, object] = {"tools": None if tools is None else list(tools), "documents": None}
        given |= {**self._special_tokens, **variables}
        template = self._templates[DEFAULT]
        if tools is not None:
            template = self._templates.get(TOOL_USE, template)
        # Templates differ in what they take for an assistant who called and said nothing: nothing, none, or no text.
        is_silent = [each.get("role") == "assistant" and "content" not in each for each in messages]
        failure: Exception | None = None
        for blank in BLANKS if any(is_silent) else BLANKS[:1]:
            filled = [{**blank, **each} if silent else each for each, silent in zip(messages, is_silent, strict=True)]
            try:
                return template.render({**given, "messages": filled})
            except Exception as error:  # noqa: BLE001 - a template can do wrong whatever Python can
                failure = failure or error
        takes = "takes them, which says" if isinstance(failure, TemplateRefusal) else "can render them"
        reason = " ".join(str(failure).split()) or type(failure).__name__
        if len(reason) > MAX_SENTENCE_LEN:
            reason = f"{reason[: MAX_SENTENCE_LEN - 3]}..."
        limit = f"such that the chat template {takes}: {reason}"
        raise InvalidRequest("messages", f"{len(messages)} messages", limit) from failure

    def fitted(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, object]] | None = None,
        *,
        continue_final_message: bool = False,
        **variables: Any,  # noqa: ANN401 - as `render` takes them
    ) -> RenderedPrompt:
        """`render` of a conversation as clients keep it: in other words where the template does not take it or leaves
        something out.

        Raises as `render`, about the conversation as it came, and InvalidRequest about a message of which the template
        shows nothing.
        """
        turns, failure = begun(messages, knows_developers="developer" in self._source), None
        # What the model's family writes around a call in JSON.
        marks = ("", "")
        syntax = self.tool_format.calls[0] if self.tool_format is not None and self.tool_format.calls else None
        if syntax is not None and syntax.body is Body.JSON and syntax.close and syntax.open:
            marks = f"{syntax.open}\n", f"\n{syntax.close[0]}"
        for said, names in told(turns, marks):
            try:
                shown = [each.message for each in said]
                prompt = self.render(shown, tools, continue_final_message=continue_final_message, **variables)
                ignored = () if self.is_default else self._unsaid(said, prompt.text, tools, **variables)
            except InvalidRequest as error:
                failure = failure or error
                continue
            return replace(prompt, ignored=tuple(dict.fromkeys([*names, *ignored])))
        raise failure or AssertionError("no way was tried")

    def _unsaid(
        self,
        turns: Turns,
        text: str,
        tools: Sequence[Mapping[str, object]] | None,
        **variables: Any,  # noqa: ANN401 - as `render` takes them
    ) -> Sequence[str]:
        """Names of what stands beside calls and is not in the prompt with this text; raises InvalidRequest about a
        message of which nothing is.
        """
        if are_shown(turns, text):
            return ()
        words, texts, calls = marked(turns)
        try:
            text = self.render([each.message for each in words], tools, **variables).text.casefold()
        except InvalidRequest:
            # It takes the texts and not the words, so nothing is known of what it shows.
            return ()
        for word, turn in [*calls.items(), *texts.items()]:
            if word not in text and (word in calls or not turn.calls):
                what = f"such that the chat template shows it: it leaves out what the role {turn.role!r} says there"
                raise InvalidRequest(f"messages.{turn.number}", turn.content or "a call", what)
        return () if all(word in text for word in texts) else (CONTENT,)

    @cached_property
    def takes_one_call(self) -> bool:
        """Whether a turn that comes back may have one call and no more, so that no more are to be made."""
        user: Message = {"role": "user", "content": "a"}
        tool = {"type": "function", "function": {"name": "a", "description": "a", "parameters": {"type": "object"}}}
        taken = []
        for count in (1, 2):
            ids = [f"call{number:05d}" for number in range(count)]
            calls = [{"id": each, "type": "function", "function": {"name": "a", "arguments": {}}} for each in ids]
            results = [{"role": "tool", "tool_call_id": each, "name": "a", "content": "a"} for each in ids]
            messages = [user, {"role": "assistant", "content": "", "tool_calls": calls}, *results]
            try:
                prompt = self.fitted(messages, [tool] if self.renders_tools else None)
            except (InvalidRequest, Unsupported):
                return False
            taken.append(CALLS not in prompt.ignored)
        return taken == [True, False]

    async def prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, object]] | None = None,
        **options: Any,  # noqa: ANN401 - as `render` takes them
    ) -> RenderedPrompt:
        """`fitted`, off the event loop when it may take long."""
        fit = partial(self.fitted, messages, tools, **options)
        text_len = sum(len(content) for each in messages if isinstance(content := each.get("content"), str))
        is_long = tools or len(messages) > LONG_CHAT or text_len > LONG_TEXT
        return await asyncio.to_thread(fit) if is_long else fit()


def _plain(messages: Sequence[Message], add_generation_prompt: bool) -> str:
    lines = []
    for number, message in enumerate(messages):
        for name in (name for name in TEMPLATE_ONLY if name in message):
            field = f"messages.{number}.{name}"
            raise Unsupported(f"{field} is not served: the model has no chat template that would show it", field=field)
        role = str(message["role"])
        lines.append(f"{SPEAKERS.get(role, role).capitalize()}: {message.get('content', '')}".rstrip())
    return "\n\n".join([*lines, *["Assistant:"] * add_generation_prompt])
