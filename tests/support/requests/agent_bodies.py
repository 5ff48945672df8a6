"""Requests as Claude Code 2.1 and Codex 0.169 shape them, in the second step of a task; their texts are shortened."""

from typing import Any

EPHEMERAL = {"type": "ephemeral"}
CLAUDE_TOOLS = (
    *("Agent", "Bash", "CronCreate", "CronDelete", "CronList", "Edit", "EnterWorktree", "ExitWorktree"),
    *("NotebookEdit", "Read", "ReportFindings", "ScheduleWakeup", "SendMessage", "Skill", "TaskCreate", "TaskGet"),
    *("TaskList", "TaskOutput", "TaskStop", "TaskUpdate", "WebFetch", "WebSearch", "Workflow", "Write"),
)
CODEX_TOOLS = ("exec_command", "write_stdin", "request_user_input", "view_image", "get_goal", "create_goal")
BILLING = "x-anthropic-billing-header: cc_version=2.1.197.123; cc_entrypoint=sdk-cli;"


def parameters(name: str) -> dict[str, Any]:
    """A schema of one text."""
    text = {"type": "string", "description": f"What {name} is given."}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {"value": text},
        "required": ["value"],
        "additionalProperties": False,
    }


def claude_code_body() -> dict[str, Any]:
    """24 tools, system blocks of which some are to be cached, a system turn in the middle, and calls with results."""
    return {
        "model": "claude-opus-4-8",
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "<system-reminder>\nToday is a Monday.\n</system-reminder>\n"},
                    {"type": "text", "text": "say hi", "cache_control": EPHEMERAL},
                ],
            },
            {"role": "system", "content": "Available agents:\n- claude: for anything."},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "There may be a file.", "signature": "c2ln"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"value": "é.txt"}},
                    {"type": "tool_use", "id": "toolu_2", "name": "Bash", "input": {"value": "ls"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"tool_use_id": "toolu_1", "type": "tool_result", "content": "1\thi", "is_error": False},
                    {
                        "tool_use_id": "toolu_2",
                        "type": "tool_result",
                        "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                        "cache_control": EPHEMERAL,
                    },
                ],
            },
        ],
        "system": [
            {"type": "text", "text": BILLING},
            {"type": "text", "text": "You are an agent.", "cache_control": EPHEMERAL},
            {"type": "text", "text": "\nYou help users.", "cache_control": EPHEMERAL},
        ],
        "tools": [
            {"name": name, "description": f"Does {name}.", "input_schema": parameters(name)} for name in CLAUDE_TOOLS
        ],
        "metadata": {"user_id": '{"device_id":"0","session_id":"1"}'},
        "max_tokens": 64_000,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
    }


def codex_body() -> dict[str, Any]:
    """Developer and user items with ids, tools of which two are of kinds of its maker's, and a call with its output."""

    def turn(role: str, text: str) -> dict[str, Any]:
        return {"type": "message", "id": "msg_1", "role": role, "content": [{"type": "input_text", "text": text}]}

    tools: list[dict[str, Any]] = [
        {
            "type": "function",
            "name": name,
            "description": f"Does {name}.",
            "strict": False,
            "parameters": parameters(name),
        }
        for name in CODEX_TOOLS
    ]
    inner = {"type": "function", "name": "wait", "description": "Waits.", "strict": False, "parameters": {}}
    return {
        "model": "outrider",
        "stream": True,
        "input": [
            turn("developer", "You are a coding agent."),
            turn("developer", "<permissions instructions>\nRead only."),
            turn("user", "<environment_context>\n  <cwd>/work</cwd>\n</environment_context>"),
            turn("user", "say hi"),
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "There may be a file."}],
                "encrypted_content": None,
            },
            {
                "type": "message",
                "id": "msg_2",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "I look."}],
            },
            {"type": "function_call", "name": "exec_command", "arguments": '{"value": "ls"}', "call_id": "call_1"},
            {"type": "function_call_output", "call_id": "call_1", "output": "a\nb"},
        ],
        "tools": [
            *tools,
            {"type": "namespace", "name": "multi_agent", "description": "Agents.", "tools": [inner]},
            {"type": "web_search", "external_web_access": False},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0",
        "client_metadata": {"thread_id": "0"},
    }
