"""Families of chat models: a template in the manner of each, and how such a model reasons and calls tools."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from support.services.reciting import ADDED

CHATML = """
{%- if tools %}<|im_start|>system
You may call these functions:
{% for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}
HOW<|im_end|>
{% endif %}
{%- for message in messages %}
    {%- set said = message.content or '' %}
    {%- if '</think>' in said %}{%- set said = said.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
    {{- '<|im_start|>' ~ message.role ~ '\\n' ~ said ~ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- else %}OPEN{% endif %}
{%- endif %}"""
QWEN3 = CHATML.replace("HOW", 'Say <tool_call>\n{{ \'{"name": .., "arguments": ..}\' }}\n</tool_call>.').replace(
    "OPEN", ""
)
QWEN35 = CHATML.replace(
    "HOW", "Say <tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n</function>\n</tool_call>."
).replace("OPEN", "{{ '<think>\\n' }}")
LLAMA3 = """
{%- for message in messages %}
    {{- '<|start_header_id|>' ~ message.role ~ '<|end_header_id|>\\n\\n' }}
    {%- if tools and loop.first %}
        {{- 'Say {"name": function name, "parameters": dictionary of arguments}.\\n\\n' }}
        {%- for tool in tools %}{{ tool | tojson(indent=4) ~ '\\n\\n' }}{% endfor %}
    {%- endif %}
    {{- (message.content or '') | trim ~ '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
MISTRAL = """
{%- if tools %}{{ '[AVAILABLE_TOOLS]' ~ tools | tojson ~ '[/AVAILABLE_TOOLS]' }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{ '[INST]' ~ message.content ~ '[/INST]' }}
    {%- elif message.tool_calls %}
        {%- for call in message.tool_calls %}
            {{- '[TOOL_CALLS]' ~ call.function.name ~ '[ARGS]' ~ call.function.arguments | tojson }}
        {%- endfor %}
    {%- else %}{{ message.content }}{% endif %}
{%- endfor %}"""
R1 = """
{%- for message in messages %}
    {%- if message.role == 'user' %}{{ '<|User|>' ~ message.content }}
    {%- else %}{{ '<|Assistant|>' ~ message.content.split('</think>')[-1] }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|Assistant|><think>\\n' }}{% endif %}"""
GEMMA = """
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {{- '<start_of_turn>' ~ ('model' if message.role == 'assistant' else message.role) ~ '\\n' }}
    {{- message.content | trim ~ '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

Call = Callable[[str, dict[str, Any]], str]


@dataclass(frozen=True)
class Family:
    """A family of models; `begins` and `ends` stand around what it thinks, where it does."""

    name: str
    template: str
    turn: str
    heads: Sequence[str]
    call: Call
    begins: str = ""
    ends: str = ""
    special: Sequence[str] = ()
    added: Sequence[str] = ()
    shows_tools: bool = True

    def thinking(self, thought: str, answer: str) -> str:
        """An answer behind a thought, if such models think."""
        return f"{self.begins}{thought}{self.ends}{answer}" if self.ends else answer


def _hermes(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def _xml(name: str, arguments: dict[str, Any]) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def _bare(name: str, arguments: dict[str, Any]) -> str:
    return json.dumps({"name": name, "parameters": arguments}, ensure_ascii=False)


def _named(name: str, arguments: dict[str, Any]) -> str:
    return f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments, ensure_ascii=False)}"


def _listed(name: str, arguments: dict[str, Any]) -> str:
    return f"[{_bare(name, arguments)}]"


CLOSED = "\n</think>\n\n"
_QWEN3 = Family("qwen 3", QWEN3, "<|im_start|>", ["assistant\n"], _hermes, "<think>\n", CLOSED, ["<|im_end|>"], ADDED)
_HEADER = ["assistant<|end_header_id|>\n\n"]
FAMILIES = (
    _QWEN3,
    replace(_QWEN3, name="qwen 3 with markers in letters", added=()),
    Family(
        *("qwen 3.5", QWEN35, "<|im_start|>", ["assistant\n<think>\n"], _xml),
        ends=CLOSED,
        special=["<|im_end|>"],
        added=ADDED,
    ),
    Family("llama 3", LLAMA3, "<|start_header_id|>", _HEADER, _bare, special=["<|end_header_id|>", "<|eot_id|>"]),
    Family("mistral", MISTRAL, "[/INST]", [""], _named, special=["[INST]", "[TOOL_CALLS]", "[ARGS]"]),
    Family(
        *("deepseek r1", R1, "<|Assistant|>", ["<think>\n"], _listed),
        ends=CLOSED,
        special=["<|User|>"],
        added=["<think>", "</think>"],
        shows_tools=False,
    ),
    Family(
        *("gemma 2", GEMMA, "<start_of_turn>", ["model\n"], _listed),
        special=["<start_of_turn>", "<end_of_turn>"],
        shows_tools=False,
    ),
)
