"""Chat templates in the manner of well-known models, each with another way to trouble a renderer."""

CHATML = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# Dates, tools in the system prompt, tool calls without content, and text that JSON for HTML would escape.
LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today is " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {{- "You may call:\\n\\n" }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim }}
        {{- '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception("One call at a time, please.") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}<|eot_id|>' }}
    {%- else %}
        {{- "<|start_header_id|>tool<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable and message.content is not string %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

# Strict alternation, a namespace that counts, and a filter over all messages.
MISTRAL = """
{%- if messages[0].role == "system" %}
    {%- set system_message = messages[0].content %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if (message.role == "user") != (ns.index % 2 == 0) %}
        {{- raise_exception("Turns must go user/assistant/user/assistant, after the system's if there is one.") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message.role == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message.content + "[/INST]" }}
        {%- else %}
            {{- "[INST] " ~ message.content ~ "[/INST]" }}
        {%- endif %}
    {%- elif message.role == "assistant" %}
        {%- generation %}
        {{- " " + message.content | trim + eos_token }}
        {%- endgeneration %}
    {%- else %}
        {{- raise_exception("Nobody but user and assistant may speak here.") }}
    {%- endif %}
{%- endfor %}
{{- " (" ~ (user_messages | length) ~ ")" }}
"""

# No system role, other names, text outside of expressions, and whitespace that only trim_blocks takes away.
GEMMA = """{{ bos_token }}
{% if messages[0]['role'] == 'system' %}
    {{ raise_exception('There is no system role.') }}
{% endif %}
{% for message in messages %}
  {% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
<start_of_turn>{{ role }}
{{ message['content'] | trim }}<end_of_turn>
{% endfor %}
{% if add_generation_prompt %}
<start_of_turn>model
{% endif %}
"""

# Macros, break and continue, namespaces that loops change, reasoning, slices, and everything else in one place.
LOOPS = """
{%- macro turn(name, text, mark='#') -%}
    {{ mark ~ name ~ mark }} {{ caller() if caller is defined else '' }}{{ text }}
{% endmacro -%}
{%- set ns = namespace(last=-1, spoken=[], self='me') %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if message.role == "user" and ns.last < 0 %}
        {%- set ns.last = index %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages if message.content is defined %}
    {%- if not message.content %}{% continue %}{% endif %}
    {%- set ns.spoken = ns.spoken + [message.role] %}
    {{- turn(message.role, message.content | replace('\\n', ' '), mark='*' * loop.index) }}
    {%- if message.reasoning_content is defined and loop.index0 > ns.last %}
        {%- call turn('thought', message.reasoning_content.split('.')[0]) %}~{% endcall %}
    {%- endif %}
    {%- if loop.last %}{{ loop.length }} of {{ loop.previtem.role if loop.previtem else none }}{% endif %}
{%- else %}
    nobody
{%- endfor %}
{%- for index in range(3) -%} {{ index }}{{ loop.cycle('a', 'b') }} {%- endfor %}
{{ ns.spoken | join(',') }} {{ ns.self }} {{ dict(a=1, b='<é>') | tojson }} {{ documents }} {{ unk_token }}
{%- filter upper %} last {{ ns.last }}{% endfilter %}
{%- set text %}{{ "%s-%d" | format('n', 2) }}{{ "{}".format(3) }}{{ 2 ** 10 }}{% endset %}{{ text }}
{%- set a, b = 1, 'two' %}{{ a }}{{ b }}{{ enable_thinking }}
"""

USER = {"role": "user", "content": " How many <b>ships</b> & 'boats'? é日😀 "}
ASSISTANT = {"role": "assistant", "content": "Three. "}
SYSTEM = {"role": "system", "content": "Be brief.\n"}
AGAIN = {"role": "user", "content": "And\nnow?"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"type": "function", "function": {"name": "count", "arguments": {"what": "<ships>", "é": [1, None]}}}
    ],
}
RESULT = {"role": "tool", "content": {"count": 3}}
THOUGHT = {"role": "assistant", "content": "Four.", "reasoning": "One more. Came in."}
TOOL = {
    "type": "function",
    "function": {
        "name": "count",
        "description": "Counts <things>.",
        "parameters": {"type": "object", "properties": {}},
    },
}
