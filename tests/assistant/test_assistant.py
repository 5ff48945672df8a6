"""The assistant that `outrider up` serves by default: it answers, and speculation changes no token of what it says.

A real model of a package: the set skips, and says why, where that cannot be had.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import openai
import pytest

from bench.surfaces import SKY, STORY, are_same, continued, conversed
from outrider.cli.pairs import Pair, choose_pair
from outrider.client import Client, Speculation
from outrider.errors import ModelRefused

pytestmark = pytest.mark.assistant

COMMAND = (sys.executable, "-c", "from outrider.cli import main; main()", "up", "--pair", "smollm2", "--json")
FREE_PORTS = ("--port", "0", "--rest-port", "0", "--draft-port", "0", "--target-port", "0")
QUESTIONS = (
    "What is the capital of France?",
    "Write a Python function that returns the larger of two numbers.",
    "Explain in three sentences why the sky is blue.",
    "Repeat this word for word: The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
)
DRAFTERS = ("auto", "lookup", "model", "eagle3", ["lookup", "model"])


@pytest.fixture(scope="module", params=["bfloat16", "int8"])
def serving(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """Addresses of a stack on free ports, in one type of weights."""
    try:
        choose_pair(Pair.SMOLLM2, fetches=True)
    except ModelRefused as error:
        pytest.skip(f"NO ASSISTANT: {error}")
    command = (*COMMAND, *FREE_PORTS, "--dtype", request.param)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            events = (json.loads(line) for line in process.stdout or ())
            yield next(event for event in events if event["event"] == "serving")
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0


def test_it_is_readable_and_the_same_by_every_door_that_is_told_nothing(serving: dict[str, Any]) -> None:
    """README's examples and a question of fact, with a seed and a length and nothing else."""
    rest, grpc = serving["rest"], serving["gateway"]
    for said, expected in (
        (continued(rest, grpc, STORY, 1, 64), "fox"),
        (conversed(rest, grpc, SKY, 1, 128), "scatter"),
        (conversed(rest, grpc, QUESTIONS[0], 2, 64), "Paris"),
    ):
        assert are_same(said), said
        assert expected in next(iter(said.values())).text
    client = openai.OpenAI(base_url=f"http://{rest}/v1", api_key="none")
    [model] = client.models.list()
    defaults = (model.model_extra or {})["generation_defaults"]
    assert (defaults["temperature"], defaults["top_p"]) == (0.2, 0.9)


def test_it_answers_over_rest(serving: dict[str, Any]) -> None:
    """The official client gets a right answer that ended by itself, with a seed and what guesses did."""
    client = openai.OpenAI(base_url=f"http://{serving['rest']}/v1", api_key="none")
    [model] = client.models.list()
    reply = client.chat.completions.create(
        model=model.id, messages=[{"role": "user", "content": QUESTIONS[0]}], temperature=0, max_tokens=64
    )
    assert "Paris" in (reply.choices[0].message.content or "")
    assert reply.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_no_drafter_changes_a_token(serving: dict[str, Any], temperature: float) -> None:
    """The head in the target's process, the draft, lookups, a list of them and whatever is fastest say what it says."""
    with Client(serving["gateway"]) as client:
        for question in QUESTIONS:
            said = [{"role": "user", "content": question}]

            def answer(speculation: Speculation, said: list[dict[str, str]] = said) -> tuple[int, ...]:
                options = {"max_tokens": 64, "seed": 7, "temperature": temperature}
                return client.chat(said, speculation=speculation, **options).result().samples[0].token_ids

            plain = answer(Speculation(enabled=False))
            assert len(plain) > 5
            for drafter in DRAFTERS:
                count = None if drafter == "auto" else 4
                assert answer(Speculation(drafter=drafter, draft_count=count)) == plain, (question, drafter)


def test_the_drafts_are_worth_something(serving: dict[str, Any]) -> None:
    """Of guesses that were tested in greedy answers the head keeps more than a quarter, and the draft a seventh."""
    with Client(serving["gateway"]) as client:
        for drafter, share in (("eagle3", 1 / 4), ("model", 1 / 7)):
            answers = [
                client.chat(
                    [{"role": "user", "content": question}],
                    max_tokens=96,
                    temperature=0,
                    speculation=Speculation(drafter=drafter, draft_count=3),
                ).result()
                for question in QUESTIONS
            ]
            figures = [answer.result.speculation for answer in answers]
            accepted, rounds = (sum(getattr(each, name) for each in figures) for name in ("accepted_tokens", "rounds"))
            # A round tests until a guess is rejected, or all are kept: so this is a little below the acceptance rate.
            assert accepted / (accepted + rounds) > share, (drafter, accepted, rounds)


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"type": "string", "maxLength": 16}, "maxItems": 3},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather of a city.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 24}, "days": {"type": "integer", "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_shapes_hold_and_guesses_change_no_token_of_them(serving: dict[str, Any], temperature: float) -> None:
    """A schema for a model that knows of it: the head reads the grammar, the draft without a tokenizer does not."""
    with Client(serving["gateway"]) as client:
        said = [{"role": "user", "content": "Invent a person. Answer in JSON with name, age and likes."}]
        options: dict[str, Any] = {"max_tokens": 96, "seed": 3, "temperature": temperature, "json_schema": PERSON}
        plain = client.chat(said, speculation=Speculation(enabled=False), **options).result().samples[0]
        assert plain.result.finish_reason == "eos"
        jsonschema_rs.validate(PERSON, json.loads(plain.text))
        for drafter in DRAFTERS:
            speculation = Speculation(drafter=drafter, draft_count=None if drafter == "auto" else 4)
            again = client.chat(said, speculation=speculation, **options).result().samples[0]
            assert again.token_ids == plain.token_ids


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_without_a_syntax_for_tools_calls_one_that_is_required(serving: dict[str, Any], stream: bool) -> None:
    """With arguments that fit the tool's schema, over the official client."""
    client = openai.OpenAI(base_url=f"http://{serving['rest']}/v1", api_key="none")
    [model] = client.models.list()
    asked: dict[str, Any] = {
        "model": model.id,
        "messages": [{"role": "user", "content": "How will the weather be in Rome for three days?"}],
        "tools": [WEATHER],
        "tool_choice": "required",
        "temperature": 0,
        "max_tokens": 96,
    }
    if stream:
        with client.chat.completions.stream(**asked) as events:
            reply = events.get_final_completion()
    else:
        reply = client.chat.completions.create(**asked)
    [choice] = reply.choices
    assert choice.finish_reason == "tool_calls"
    for call in choice.message.tool_calls or []:
        assert call.function.name == "weather"
        jsonschema_rs.validate(WEATHER["function"]["parameters"], json.loads(call.function.arguments))
    assert choice.message.tool_calls
