"""`outrider chat` in a terminal, against a gateway that follows a script."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from support.command_line import INTERRUPT, UP, ScriptedGateway, scripted_gateway, terminal

PROMPT = "> "
FIGURES = "first token 0 ms, cached 1 of 2 prompt tokens"
ANSWER = "Once upon a!"


@pytest.fixture
async def gateway() -> AsyncIterator[ScriptedGateway]:
    async with scripted_gateway() as servicer:
        yield servicer


def said(gateway: ScriptedGateway) -> list[str]:
    """What the messages of the last request say."""
    return [message.content for message in gateway.chats[-1].messages]


@pytest.mark.slow
async def test_a_conversation_in_a_terminal(gateway: ScriptedGateway) -> None:
    """Styles, figures, history, another seed, edits, a race, Ctrl-C that keeps what came, a reset; twice it leaves."""
    async with terminal("chat", "--address", gateway.address, "--system", "Be brief.") as screen:
        await screen.until(PROMPT)
        screen.type("Hello\n")
        assert ANSWER in await screen.until(FIGURES)
        assert "\x1b[1;32m upon\x1b[0m" in screen.shown
        assert said(gateway) == ["Be brief.", "Hello"]
        screen.type("/retry\n")
        await screen.until(FIGURES)
        seeds = [chat.generation.seed for chat in gateway.chats]
        assert len(set(seeds)) == 2
        assert said(gateway) == ["Be brief.", "Hello"]
        await screen.until(PROMPT)
        screen.type(f"{UP}{UP}\n")
        await screen.until(FIGURES)
        assert said(gateway) == ["Be brief.", "Hello", ANSWER, "Hello"]
        await screen.until(PROMPT)
        screen.type("/edit Hello again\n")
        await screen.until(FIGURES)
        assert said(gateway) == ["Be brief.", "Hello", ANSWER, "Hello again"]
        await screen.until(PROMPT)
        screen.type("/race\n")
        await screen.until("Identical token for token: 3 tokens.")
        await screen.until(PROMPT)
        screen.type("/edit #1 Hi\n")
        await screen.until(FIGURES)
        assert said(gateway) == ["Be brief.", "Hi"]
        await screen.until(PROMPT)
        screen.type("wait\n")
        await screen.until("Once")
        screen.type(INTERRUPT)
        await screen.until("stopped, 1 tokens")
        await asyncio.wait_for(gateway.cancelled.wait(), 120)
        await screen.until(PROMPT)
        screen.type("go on\n")
        await screen.until(FIGURES)
        assert said(gateway)[-3:] == ["wait", "Once", "go on"]
        await screen.until(PROMPT)
        screen.type("/reset\n")
        await screen.until("The conversation is forgotten.")
        screen.type("Who?\n")
        await screen.until(FIGURES)
        assert said(gateway) == ["Be brief.", "Who?"]
        await screen.until(PROMPT)
        await screen.press_until(INTERRUPT, "Ctrl-C again leaves")
        await screen.press_to_leave(INTERRUPT)
        assert screen.process.returncode == 130


@pytest.mark.slow
async def test_errors_end_no_conversation(gateway: ScriptedGateway) -> None:
    """A refusal and a wrong command are sentences; what was refused is not sent again."""
    async with terminal("chat", "--address", gateway.address) as screen:
        await screen.until(PROMPT)
        screen.type("refuse\n")
        await screen.until("--temperature is -1.0, but must be at least 0")
        screen.type("/rety\n")
        await screen.until("There is no command /rety; /help lists all")
        screen.type("/ret\t\n")
        await screen.until("--temperature is -1.0")
        screen.type("/edit\n")
        await screen.until("/edit needs the new text behind it.")
        screen.type("/edit Changed\n")
        await screen.until(FIGURES)
        assert said(gateway) == ["Changed"]
        screen.type("refuse\n")
        await screen.until("--temperature is -1.0")
        screen.type("two \\\nlines\n")
        await screen.until(FIGURES)
        assert said(gateway) == ["Changed", ANSWER, "two \nlines"]
        await screen.until(PROMPT)
        # An end that comes before somebody reads is lost with what the terminal held.
        screen.type("\x04")
        assert await asyncio.wait_for(screen.process.wait(), 120) == 0


@pytest.mark.slow
async def test_reasoning_stands_above_the_answer(gateway: ScriptedGateway) -> None:
    """Dim, and no part of the next request."""
    async with terminal("chat", "--address", gateway.address) as screen:
        await screen.until(PROMPT)
        screen.type("think\n")
        shown = await screen.until(FIGURES)
        assert shown.index("Hm, tales.") < shown.index("Once")
        await screen.until(PROMPT)
        screen.type("Hello\n")
        await screen.until(FIGURES)
        assert said(gateway) == ["think", ANSWER, "Hello"]
        await screen.until(PROMPT)
        screen.type("\x04")
