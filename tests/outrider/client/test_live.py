"""The clients, the command line and the raw protocol in front of one running stack; the examples of the document."""

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support.stack import PATIENCE_S, RunningStack, running_stack

from outrider.client import Answer, Client, GenerationOptions, Speculation

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "clients" / "client.md"
DOCUMENTED_ADDRESS = "127.0.0.1:50050"
OUTRIDER = (sys.executable, "-c", "from outrider.cli import main; main()")
EXAMPLES: list[str] = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
PROMPT = "The fox said to the wolf,"
MESSAGES = [{"role": "user", "content": "Grüße! What did the fox say?"}]

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[RunningStack]:
    async with running_stack() as running:
        yield running


async def run(*arguments: str, stdin: str = "") -> str:
    """What a command prints; fails unless it ends well."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*arguments, stdin=pipe, stdout=pipe, stderr=pipe)
    output, notes = await asyncio.wait_for(process.communicate(stdin.encode()), PATIENCE_S)
    assert process.returncode == 0, notes.decode()
    return output.decode()


async def test_all_surfaces_give_the_same_tokens(stack: RunningStack) -> None:
    """Raw stub, both clients and the command line, for each of several samples, however the draft guesses."""
    options = GenerationOptions(max_tokens=24, temperature=0.8, seed=5, sample_count=2)
    raw = await stack.generate(text=PROMPT, max_tokens=24, temperature=0.8, seed=5)

    def blocking() -> Answer:
        with Client(stack.address) as client:
            return client.generate(PROMPT, **options, speculation=Speculation(draft_count=2)).result()

    first = await asyncio.to_thread(blocking)
    second = await stack.client.generate(PROMPT, **options, speculation=Speculation(enabled=False)).result()
    flags = (
        "--max-tokens",
        "24",
        "--temperature",
        "0.8",
        "--seed",
        "5",
        "-n",
        "2",
        "--json",
        "--address",
        stack.address,
    )
    told = json.loads(await run(*OUTRIDER, "generate", PROMPT, *flags))["samples"]
    assert first.token_ids == raw.token_ids
    assert first.text == raw.text
    for index, sample in enumerate(first.samples):
        assert sample.token_ids == second.samples[index].token_ids == tuple(told[index]["token_ids"])
        assert sample.text == second.samples[index].text == told[index]["text"]
    assert first.samples[0].token_ids != first.samples[1].token_ids


@pytest.mark.slow
async def test_a_conversation_is_the_same_on_the_command_line(stack: RunningStack) -> None:
    """Turn by turn: the second one carries the first, which the prefix cache knows by then."""
    options: Any = {"max_tokens": 24, "seed": 5}
    first = await stack.client.chat(MESSAGES, **options).result()
    longer = [*MESSAGES, {"role": "assistant", "content": first.text}, {"role": "user", "content": "And the wolf?"}]
    second = await stack.client.chat(longer, **options).result()
    lines = f"{MESSAGES[0]['content']}\n\nAnd the wolf?\n"
    told = await run(
        *OUTRIDER, "chat", "--max-tokens", "24", "--seed", "5", "--json", "--address", stack.address, stdin=lines
    )
    turns = [json.loads(line) for line in told.splitlines()]
    assert [tuple(turn["token_ids"]) for turn in turns] == [first.token_ids, second.token_ids]
    assert [turn["user"] for turn in turns] == [MESSAGES[0]["content"], "And the wolf?"]
    assert turns[1]["usage"]["cached_prompt_tokens"] > 0
    counts = {"prompt_tokens", "completion_tokens", "cached_prompt_tokens"}
    assert turns[1]["usage"].keys() == counts | {"accepted_prediction_tokens", "rejected_prediction_tokens"}
    assert [turn["text"] for turn in turns] == [first.text, second.text]


async def test_streamed_text_is_the_text(stack: RunningStack) -> None:
    """Pieces join to what the answer says, and the tokens' shares as well."""
    stream = stack.client.generate(PROMPT, max_tokens=40, seed=3, stop="the")
    pieces = [piece async for piece in stream.text()]
    answer = await stream.result()
    assert "".join(pieces) == answer.text
    assert answer.result.finish_reason == "stop_string"
    assert len(answer.token_ids) == answer.result.completion_tokens


async def test_rounds_tell_what_was_rejected(stack: RunningStack) -> None:
    """With return_rounds the guesses of a round are its accepted tokens and its rejected ones."""
    answer = await stack.client.generate(
        PROMPT, max_tokens=40, seed=3, speculation=Speculation(draft_count=4, return_rounds=True)
    ).result()
    rounds = [each for each in answer.samples[0].rounds if each.facts.draft_count]
    assert any(each.rejected for each in rounds)
    figures = answer.result.speculation
    assert figures.drafts == len(rounds)
    assert figures.mean_acceptance_length == 1 + figures.accepted_tokens / figures.drafts
    for each in rounds[:-1]:
        assert len(each.rejected) == each.facts.draft_count - each.facts.accepted_count
        assert all(token.draft_logprob is not None for token in each.tokens[: each.facts.accepted_count])


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
async def test_documented_examples_run(stack: RunningStack, example: str) -> None:
    """As they stand in the document, but for the port."""
    assert DOCUMENTED_ADDRESS in example
    said = await run(sys.executable, "-c", example.replace(DOCUMENTED_ADDRESS, stack.address))
    assert len(said.split()) > 8
