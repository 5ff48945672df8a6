"""Conversations as prompts: the same characters as transformers, and sentences where a template does not take them."""

import threading
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
from jinja2 import TemplateError
from support.models import chat_templates as templates
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from gateway.text.chat_template import ChatTemplate, RenderedPrompt, TemplateFiles
from gateway.text.template_sandbox import SafeTemplate
from outrider.errors import InvalidRequest, ModelRefused, Unsupported

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
CONVERSATIONS = {
    "one": [templates.USER],
    "system": [templates.SYSTEM, templates.USER],
    "turns": [templates.USER, templates.ASSISTANT, templates.AGAIN],
    "all": [templates.SYSTEM, templates.USER, templates.ASSISTANT, templates.AGAIN],
    "calls": [templates.SYSTEM, templates.USER, templates.CALL, templates.RESULT, templates.THOUGHT],
    "thoughts": [templates.USER, templates.THOUGHT],
    "silence": [templates.USER, {"role": "assistant", "content": ""}, {"role": "assistant", "name": "x"}],
}
BLANKS: list[dict[str, str | None]] = [{}, {"content": None}, {"content": ""}]
VARIABLES: list[dict[str, str]] = [{}, {"date_string": "1 Mai 1001", "enable_thinking": "yes"}]
SOURCES = {name: source for name, source in vars(templates).items() if isinstance(source, str) and name.isupper()}


def ours(source: str) -> ChatTemplate:
    """A template without a folder."""
    return ChatTemplate(TemplateFiles({"default": source}, TOKENS))


@pytest.fixture(scope="module")
def reference() -> PreTrainedTokenizerFast:
    """A tokenizer of transformers that knows one token."""
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")), **TOKENS)


def outcome(render: Callable[..., str], *args: object, **options: object) -> tuple[str, str]:
    """The prompt, or what is said instead."""
    try:
        return "prompt", render(*args, **options)
    except (InvalidRequest, TemplateError) as error:
        return "refusal", str(error).rpartition(": ")[2]


@pytest.mark.parametrize("name", SOURCES)
def test_prompts_are_those_of_transformers(reference: PreTrainedTokenizerFast, name: str) -> None:
    """Every conversation, with and without tools, a last turn to fill and variables; refusals word for word.

    Where it fails because an assistant said nothing, the prompt is that for content which is null or no text.
    """
    template = ours(SOURCES[name])
    reference.chat_template = SOURCES[name]
    expect = partial(reference.apply_chat_template, tokenize=False)
    prompts = set()
    tools = (None, [templates.TOOL]) if template.renders_tools else (None,)
    for messages, tool, is_open, variables in product(CONVERSATIONS.values(), tools, (True, False), VARIABLES):
        options = {"add_generation_prompt": is_open, **variables}
        found = outcome(lambda *args, **rest: template.render(*args, **rest).text, messages, tool, **options)
        expected = [
            outcome(
                expect,
                [{**blank, **each} if each["role"] == "assistant" else each for each in messages],
                tool,
                **options,
            )
            for blank in BLANKS
        ]
        assert found == next((each for each in expected if each[0] == "prompt"), expected[0])
        prompts |= {found[1]} if found[0] == "prompt" else set()
    assert len(prompts) > 3


@pytest.mark.parametrize("name", SOURCES)
def test_a_message_goes_on_as_with_transformers(reference: PreTrainedTokenizerFast, name: str) -> None:
    """The prompt ends with the last message, trimmed where the template trims; one that cannot show it is named."""
    template = ours(SOURCES[name])
    reference.chat_template = SOURCES[name]
    for messages in CONVERSATIONS.values():
        try:
            expected = reference.apply_chat_template(messages, tokenize=False, continue_final_message=True)
        except (ValueError, TemplateError):
            with pytest.raises(InvalidRequest):
                template.render(messages, add_generation_prompt=False, continue_final_message=True)
            continue
        rendered = template.render(messages, add_generation_prompt=False, continue_final_message=True)
        assert rendered.text == expected
        assert rendered.text.rstrip().endswith(messages[-1]["content"].strip())


def test_an_assistant_may_have_called_and_said_nothing() -> None:
    """Whether a template wants no content there, none, or no text; what a template cannot do with any is named."""
    calls = "{% if m.tool_calls %}<{{ m.tool_calls[0].id }}>{% endif %}"
    wants_text = f"{{% for m in messages %}}{{{{ m.role + ': ' + m.content }}}}{calls}{{% endfor %}}"
    wants_none = f"{{% for m in messages %}}{{% if m.content is none %}}{calls}{{% else %}}{{{{ m.content + ';' }}}}"
    wants_none += "{% endif %}{% endfor %}"
    for source, prompt in ((wants_text, "user: Who?assistant: <a>"), (wants_none, "Who?;<a>")):
        messages = [{"role": "user", "content": "Who?"}, {"role": "assistant", "tool_calls": [{"id": "a"}]}]
        assert ours(source).render(messages).text == prompt


@pytest.mark.parametrize(
    ("source", "named", "called"),
    [
        (templates.CHATML, False, False),
        (templates.LLAMA3, False, True),
        ("{% for msg in messages %}{{ msg['name'] }}{% endfor %}", True, False),
        ("{% for message in messages %}{% if 'name' in message %}x{% endif %}{% endfor %}", True, False),
        ("{% for tool in tools %}{{ tool.name }}{{ item.name }}{{ tool['name'] }}{% endfor %}", False, False),
    ],
)
def test_which_fields_a_template_reads(source: str, named: bool, called: bool) -> None:
    """The name of who speaks is none of a tool."""
    template = ours(source)
    assert (template.shows("name"), template.shows("tool_calls")) == (named, called)


@pytest.mark.parametrize("source", ["{{ messages[-1].role }}", "{{ messages[-1].content | upper }}"])
def test_a_message_that_is_not_shown_cannot_go_on(source: str) -> None:
    """Where the template leaves it out, or shows something else."""
    with pytest.raises(InvalidRequest, match=r"^continue_final_message is True, but must be false: the chat template"):
        ours(source).render([templates.ASSISTANT], continue_final_message=True)


def test_how_a_prompt_ends_is_no_variable() -> None:
    """Even where a template reads it: requests have fields for it."""
    assert ours("{{ add_generation_prompt }}{{ continue_final_message }}{{ other }}").variables == {"other"}


def test_lines_go_on() -> None:
    """Without a template too."""
    plain = ChatTemplate().render([templates.USER, templates.ASSISTANT], continue_final_message=True)
    assert plain.text == ChatTemplate().render([templates.USER, templates.ASSISTANT], add_generation_prompt=False).text


def test_a_refusal_is_the_template_s_sentence() -> None:
    """On one line of bounded length, about the messages; what a template cannot do is Python's sentence."""
    with pytest.raises(InvalidRequest) as caught:
        ours(templates.GEMMA).render([templates.SYSTEM, templates.USER])
    limit = "such that the chat template takes them, which says: There is no system role."
    assert caught.value.metadata == {"field": "messages", "value": "'2 messages'", "limit": limit}
    with pytest.raises(InvalidRequest, match=r"can render them: 'dict object' has no attribute 'content'$"):
        ours(templates.CHATML).render([{"role": "user"}])
    with pytest.raises(InvalidRequest) as caught:
        ours("{{ raise_exception('no\nno ' * 500) }}").render([templates.USER])
    assert "no no no" in caught.value.message
    assert (len(caught.value.message) < 500, "\n" in caught.value.message) == (True, False)


def test_without_a_template_there_are_lines() -> None:
    """And the tokenizer's own special tokens; an assistant who said nothing has an empty line."""
    plain = ChatTemplate()
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": None},
        {"role": "developer", "content": "Briefer."},
    ]
    lines = "System: Be brief.\n\nUser: Who?\n\nAssistant:\n\nSystem: Briefer."
    assert plain.render(messages) == RenderedPrompt(f"{lines}\n\nAssistant:", add_special_tokens=True)
    assert plain.render(messages, add_generation_prompt=False).text == lines
    assert (plain.is_default, plain.renders_tools) == (True, False)


def test_a_template_writes_the_special_tokens() -> None:
    """So that the tokenizer must not."""
    template = ours(templates.GEMMA)
    assert template.render([templates.USER]).text.startswith("<s>")
    assert not template.render([templates.USER]).add_special_tokens
    assert not template.is_default


def test_nothing_is_left_out_in_silence() -> None:
    """Tools where there is no place for them, and what only a template can show where there is none."""
    for template in (ChatTemplate(), ours(templates.CHATML)):
        assert not template.renders_tools
        with pytest.raises(Unsupported, match=r"^tools is not served"):
            template.render([templates.USER], [templates.TOOL])
    for name, message in (
        ("tool_calls", templates.CALL),
        ("name", {**templates.USER, "name": "bob"}),
        ("tool_call_id", {"role": "tool", "content": "3", "tool_call_id": "a"}),
    ):
        with pytest.raises(Unsupported, match=rf"^messages\.1\.{name} is not served") as caught:
            ChatTemplate().render([templates.USER, message])
        assert caught.value.metadata["field"] == f"messages.1.{name}"
    assert ours(templates.LLAMA3).renders_tools


def test_tools_have_a_template_of_their_own_where_there_is_one() -> None:
    """The default one is for conversations without."""
    sources = {"default": "plain {{ messages | length }}", "tool_use": "{{ tools[0].function.name }}"}
    template = ChatTemplate(TemplateFiles(sources))
    assert template.render([templates.USER]).text == "plain 1"
    assert template.render([templates.USER], [templates.TOOL]).text == "count"


def test_templates_that_cannot_serve_are_refused() -> None:
    """At the start, in a sentence that names the model."""
    with pytest.raises(ModelRefused, match=r"^the chat template of org/m does not compile: .*nonsense"):
        ChatTemplate(TemplateFiles({"default": "{% nonsense %}"}), "org/m")
    with pytest.raises(ModelRefused, match=r"^org/m has chat templates named rag, tool_use, but no default one"):
        ChatTemplate(TemplateFiles({"rag": "", "tool_use": ""}), "org/m")


@pytest.mark.parametrize(
    ("messages", "is_aside"),
    [([templates.USER], False), ([templates.USER] * 40, True), ([{"role": "user", "content": "a" * 9000}], True)],
)
async def test_long_renderings_leave_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, messages: list[dict[str, Any]], is_aside: bool
) -> None:
    """Many messages, or long ones; the prompt is the same."""
    threads = []
    render = SafeTemplate.render

    def noted(*args: Any) -> str:
        threads.append(threading.current_thread())
        return render(*args)

    monkeypatch.setattr(SafeTemplate, "render", noted)
    template = ours(templates.CHATML)
    assert await template.prompt(messages) == template.render(messages)
    assert (threads[0] is not threading.current_thread()) == is_aside
