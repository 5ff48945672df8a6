"""One request by REST, gRPC and command line: the same tokens; and streamed text is the text, whatever its bytes."""

import asyncio
import json
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
from support.grid import RULES, ask
from support.rest.event_streams import check_stream
from support.rest.rest_rows import body_of
from support.rest.rest_stack import CHAT, COMPLETIONS, RestStack
from support.stack import TARGET, request_of

from gateway.text.tokenizer import Tokenizer
from outrider.v1 import generation_service_pb2 as pb
from outrider.v1.generation_service_pb2_grpc import GenerationServiceStub
from outrider.v1.types_pb2 import FinishReason

pytestmark = pytest.mark.asyncio(loop_scope="module")
COMMAND = (sys.executable, "-c", "from outrider.cli import main; main()", "generate", "--json")
PROMPT = "Il \u00e9tait une fois \u65e5\u672c \U0001f600 a king"
# Bytes of which characters are made that the model would not say by itself, as tokens with so much bias.
EMOJI, CJK, ACCENTS = ((173, 254, 247, 223), 20.0), ((163, 246, 99), 20.0), ((128, 103), 10.0)


def forced(which: tuple[tuple[int, ...], float]) -> dict[int, float]:
    """A bias towards some bytes."""
    token_ids, bias = which
    return dict.fromkeys(token_ids, bias)


# Fields as gRPC has them, and the same as options of the command, which takes a while to start.
SURFACE = pytest.mark.surface
CASES: dict[str, tuple[dict[str, Any], tuple[str, ...] | None]] = {
    "defaults": ({}, None),
    "greedy": ({"temperature": 0.0, "draft_count": 3}, None),
    "four samples": ({"sample_count": 4, "top_p": 0.9}, None),
    "other rules": ({"enabled": False, "rule": RULES["ratio"], "sample_count": 2}, None),
    "emoji": (
        {"logit_bias": forced(EMOJI), "draft_count": 4, "sample_count": 4},
        ("-n", "4", "--draft-count", "4", *(f"--logit-bias={token_id}=20" for token_id in EMOJI[0])),
    ),
    "many": (
        {
            **{"presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.2, "top_k": 40},
            **{"min_p": 0.02, "stop": [" the", "\u00e9"], "banned_words": ["king"], "min_tokens": 4},
        },
        (
            *("--presence-penalty", "0.5", "--frequency-penalty", "0.25", "--repetition-penalty", "1.2"),
            *(
                "--top-k",
                "40",
                "--min-p",
                "0.02",
                "--stop",
                " the",
                "--stop",
                "\u00e9",
                "--ban",
                "king",
                "--min-tokens",
                "4",
            ),
        ),
    ),
}
# Enough for every day.
USUAL = ("defaults", "emoji")


async def by_command(rest: RestStack, fields: tuple[str, ...]) -> list[dict[str, Any]]:
    """The samples that the command line prints."""
    assert rest.stack.gateway is not None
    arguments = (PROMPT, "--seed", "11", "--max-tokens", "40", "--address", rest.stack.gateway.address, *fields)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*COMMAND, *arguments, stdout=pipe, stderr=pipe)
    output, notes = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0, notes.decode()
    samples: list[dict[str, Any]] = json.loads(output)["samples"]
    return samples


@cache
def ids() -> dict[bytes, int]:
    """The token of each piece; log-probabilities show pieces, and no two tokens are spelled alike."""
    tokenizer = Tokenizer(TARGET)
    pieces = [tokenizer.piece(token_id) for token_id in range(tokenizer.vocabulary().size)]
    found = {piece.raw: token_id for token_id, piece in enumerate(pieces)}
    assert len(found) == len({piece.text for piece in pieces}) == len(pieces)
    return found | {piece.text.encode(): found[piece.raw] for piece in pieces if piece.text.startswith("bytes:")}


def token_ids(choice: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens of an answer by REST, as its log-probabilities spell them."""
    told = choice["logprobs"]
    if "content" in told:
        return tuple(ids()[bytes(each["bytes"])] for each in told["content"])
    return tuple(ids()[piece.encode()] for piece in told["tokens"])


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in USUAL else SURFACE) for name in CASES])
async def test_surfaces_say_the_same(rest: RestStack, name: str) -> None:
    """Token ids, text and the reason to end, for every sample; by the command line too, where there are options."""
    fields, options = CASES[name]
    request = {"text": PROMPT, "seed": 11, "max_tokens": 40, **fields}
    samples = await ask(rest.stack, request)
    choices = (await rest.ask(COMPLETIONS, **body_of({**request, "logprob_count": 0})))["choices"]
    assert [token_ids(choice) for choice in choices] == samples.token_ids
    assert [choice["text"] for choice in choices] == [answer.text for answer in samples.answers]
    reasons = [FinishReason.Name(answer.completion.finish_reason) for answer in samples.answers]
    assert [choice["finish_reason"] for choice in choices] == [
        "length" if reason == "FINISH_REASON_LENGTH" else "stop" for reason in reasons
    ]
    if options is not None:
        printed = await by_command(rest, options)
        assert [tuple(each["token_ids"]) for each in printed] == samples.token_ids
        assert [each["text"] for each in printed] == [choice["text"] for choice in choices]
        assert [f"FINISH_REASON_{each['finish_reason'].upper()}" for each in printed] == reasons


async def test_chat_says_what_its_prompt_says(rest: RestStack) -> None:
    """A conversation is its rendered text: the same tokens by REST's chat and by gRPC's Chat."""
    body = body_of({"seed": 11, "max_tokens": 40, "draft_count": 3, "sample_count": 2})
    reply = await rest.ask(CHAT, messages=[{"role": "user", "content": PROMPT}], **body, logprobs=True)
    samples = await chat_by_grpc(rest)
    assert [token_ids(choice) for choice in reply["choices"]] == samples
    assert len(samples[0]) == 40


async def chat_by_grpc(rest: RestStack) -> list[tuple[int, ...]]:
    """The tokens of two answers."""
    assert rest.stack.gateway is not None
    stub = GenerationServiceStub(rest.stack.channel(rest.stack.gateway.address))
    generation = request_of(seed=11, max_tokens=40, draft_count=3, sample_count=2)
    messages = [pb.ChatMessage(role="user", content=PROMPT)]
    found: dict[int, list[int]] = {0: [], 1: []}
    async for response in stub.Chat(pb.ChatRequest(messages=messages, generation=generation)):
        found[response.round.sample_index] += [token.token_id for token in response.round.tokens]
    return [tuple(found[0]), tuple(found[1])]


@pytest.mark.parametrize("which", [EMOJI, CJK, ACCENTS], ids=["emoji", "cjk", "accents"])
@pytest.mark.parametrize("path", [CHAT, pytest.param(COMPLETIONS, marks=SURFACE)])
async def test_deltas_join_to_the_text(rest: RestStack, path: str, which: tuple[tuple[int, ...], float]) -> None:
    """No half characters in a delta, none lost or doubled, for four answers at a time; bytes that are none are kept."""
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": PROMPT}]} if path == CHAT else {"prompt": PROMPT}
    seen = ""
    for seed in (10, 11):
        body = body_of(
            {"seed": seed, "max_tokens": 24, "sample_count": 4, "logit_bias": forced(which), "draft_count": 4}
        )
        whole = await rest.ask(path, **prompt, **body)
        stream = await rest.stream(path, **prompt, **body)
        check_stream(stream, is_chat=path == CHAT, count=4)
        texts = [choice["text"] if path == COMPLETIONS else choice["message"]["content"] for choice in whole["choices"]]
        assert [stream.text(index) for index in range(4)] == texts
        seen += "".join(texts)
    assert any(ord(character) > 127 and character != "\ufffd" for character in seen)
    assert "\ufffd" in seen


async def test_stop_strings_across_rounds(rest: RestStack) -> None:
    """Wherever a stop string begins in the text, streamed or not, all before it is said and nothing of it."""
    fields: dict[str, Any] = {"prompt": PROMPT, "seed": 11, "max_tokens": 40, "ignore_eos": True}
    speculation = {"draft_count": 4}
    full = (await rest.ask(COMPLETIONS, **fields, speculation=speculation))["choices"][0]["text"]
    for length, start in ((3, 1), (12, 25), (20, 5)):
        stop = full[start : start + length]
        expected = full[: full.index(stop)]
        for each in (stop, ["\u2603\u2603", stop]):
            stream = await rest.stream(COMPLETIONS, **fields, speculation=speculation, stop=each)
            check_stream(stream, is_chat=False)
            assert (stream.text(), stream.finish_reasons()) == (expected, ["stop"])
            [choice] = (await rest.ask(COMPLETIONS, **fields, speculation=speculation, stop=each))["choices"]
            assert (choice["text"], choice["finish_reason"]) == (expected, "stop")


async def test_stop_within_a_character(rest: RestStack) -> None:
    """A stop string of characters that take several tokens each."""
    body = body_of({"seed": 9, "max_tokens": 40, "logit_bias": forced(CJK), "draft_count": 4})
    full = (await rest.ask(COMPLETIONS, prompt=PROMPT, **body))["choices"][0]["text"]
    rare = next(
        place for place, character in enumerate(full) if place and ord(character) > 255 and character != "\ufffd"
    )
    stream = await rest.stream(COMPLETIONS, prompt=PROMPT, **body, stop=full[rare])
    assert stream.text() == full[: full.index(full[rare])]
    assert stream.finish_reasons() == ["stop"]
