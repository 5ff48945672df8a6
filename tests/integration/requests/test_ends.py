"""Where real answers end: what files, names, templates and requests say, in target and draft, and through every door.

The pair's comma or full stop has another name here, so that its answers meet the token again and again.
"""

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from structlog.testing import capture_logs
from support.models.chat_templates import CHATML
from support.models.renamed import write_renamed_pair
from support.rest.rest_stack import RestStack, rest_stack
from support.stack import Answer, RunningStack, running_stack

from outrider.v1 import types_pb2

PROMPT = "Once upon a time there was a king"
COMMA, STOP = 12, 14
MARK = "<|mark|>"


async def with_and_without(stack: RunningStack, **fields: Any) -> Answer:
    """The answer to a request, which is the same whatever guesses."""
    request = {"text": PROMPT, "seed": 5, "temperature": 0.9, "max_tokens": 60, **fields}
    plain = await stack.generate(**request, enabled=False)
    for guessing in ({"draft_count": 7}, {}):
        answer = await stack.generate(**request, **guessing)
        assert answer.token_ids == plain.token_ids
        assert answer.text == plain.text
        assert answer.completion.finish_reason == plain.completion.finish_reason
    return plain


def in_tokenizer_config(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": MARK}))


def in_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": COMMA}))


def in_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(CHATML.replace("<|im_end|>", MARK))


def nowhere(_: Path) -> None:
    """Makes no model: its name says enough."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "special", "say"),
    [
        (MARK, True, in_tokenizer_config),
        (MARK, False, in_config),
        (MARK, True, in_template),
        ("<|im_end|>", True, nowhere),
        ("<|eot_id|>", False, nowhere),
    ],
)
async def test_whatever_is_said_to_end_an_answer_ends_it(
    tmp_path: Path, name: str, special: bool, say: Callable[[Path], None]
) -> None:
    """Although generation_config.json names another token; without its text, and with the same tokens for any draft."""
    target, draft = write_renamed_pair(tmp_path, {",": name}, special=special)
    say(Path(target))
    async with running_stack(target, draft) as stack:
        open_end = await with_and_without(stack, ignore_eos=True)
        assert open_end.token_ids.count(COMMA) > 1
        assert len(open_end.token_ids) == 60
        answer = await with_and_without(stack)
        end = open_end.token_ids.index(COMMA)
        assert answer.token_ids == open_end.token_ids[: end + 1]
        assert answer.completion.finish_reason == types_pb2.FINISH_REASON_EOS
        assert name not in answer.text
        later = await with_and_without(stack, min_tokens=end + 5)
        assert COMMA not in later.token_ids[: end + 5]


@pytest.mark.slow
async def test_a_grammar_ends_with_any_end(tmp_path: Path) -> None:
    """Also with one that only the template knows."""
    target, draft = write_renamed_pair(tmp_path, {",": MARK}, generation_config={})
    in_template(Path(target))
    async with running_stack(target, draft) as stack:
        answer = await with_and_without(
            stack, constraint={"regex": "( [a-z]{3,5}){2}"}, logit_bias={0: -100.0, COMMA: 100.0}
        )
        assert answer.token_ids[-1] == COMMA
        assert answer.completion.finish_reason == types_pb2.FINISH_REASON_EOS


async def test_a_model_without_an_end_is_warned_about(tmp_path: Path) -> None:
    """When target and gateway start, and so is a template whose closing is no token."""
    target, draft = write_renamed_pair(tmp_path, {"<|endoftext|>": MARK}, generation_config={}, tokenizer_config={})
    config = json.loads((Path(target) / "config.json").read_text())
    (Path(target) / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    (Path(target) / "chat_template.jinja").write_text(CHATML)
    with capture_logs() as lines:
        async with running_stack(target, draft):
            pass
    warned = {line["event"]: line for line in lines if line["log_level"] == "warning"}
    assert "no token ends an answer" in warned
    assert "'<|im_end|>', which is no token of its own" in warned["the end of a turn is not known"]["reason"]


async def test_where_each_end_was_found_is_said_at_the_start(tmp_path: Path) -> None:
    """By the target what its files say, by the gateway what the template says."""
    target, draft = write_renamed_pair(tmp_path, {",": MARK, ".": "<|im_end|>"})
    in_template(Path(target))
    with capture_logs() as lines:
        async with running_stack(target, draft):
            pass
    told = [line["tokens"] for line in lines if line["event"] == "ends of answers"]
    files = ["generation_config.json", "config.json", "tokenizer_config.json", "its name"]
    assert {"<|endoftext|> (0)": files, "<|im_end|> (14)": ["its name"]} in told
    assert {
        "<|endoftext|> (0)": ["the target"],
        f"{MARK} (12)": ["the chat template"],
        "<|im_end|> (14)": ["the target"],
    } in told
    assert not [line for line in lines if line["log_level"] == "warning"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def marked(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RestStack]:
    """A stack whose comma is a special token that ends nothing by itself."""
    target, draft = write_renamed_pair(tmp_path_factory.mktemp("marked"), {",": MARK})
    async with rest_stack(target=target, draft=draft) as stack:
        yield stack


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.slow
async def test_a_stop_that_names_a_special_token_ends_there(marked: RestStack) -> None:
    """As a stop string does for clients, and as a stop token for the target: nothing is drawn after it."""
    whole = await with_and_without(marked.stack, ignore_eos=True)
    end = whole.token_ids.index(COMMA)
    for stops in ([MARK], ["no such text", MARK], [MARK, "<|endoftext|>"]):
        answer = await with_and_without(marked.stack, ignore_eos=True, stop=stops)
        assert answer.token_ids == whole.token_ids[: end + 1]
        assert answer.completion.finish_reason == types_pb2.FINISH_REASON_STOP_STRING
        assert whole.text.startswith(answer.text)


@pytest.mark.slow
async def test_a_stop_may_have_text_around_the_name(marked: RestStack) -> None:
    """All of it goes from the text, which clients read without the name."""
    whole = await with_and_without(marked.stack, ignore_eos=True)
    tokenizer = marked.stack.gateway.backend.tokenizer  # type: ignore[union-attr]
    end = whole.token_ids.index(COMMA)
    verbatim = tokenizer.verbatim(list(whole.token_ids))
    place = verbatim.index(MARK)
    stop = verbatim[place - 3 : place + len(MARK) + 3]
    answer = await with_and_without(marked.stack, ignore_eos=True, stop=[stop])
    assert answer.text == verbatim[: place - 3]
    assert answer.completion.finish_reason == types_pb2.FINISH_REASON_STOP_STRING
    assert len(answer.token_ids) > end + 1


@pytest.mark.slow
async def test_min_tokens_holds_back_stop_strings(marked: RestStack) -> None:
    """By the token that completes them; the same over gRPC and REST, whole and streamed, for all samples and drafts."""
    tokenizer = marked.stack.gateway.backend.tokenizer  # type: ignore[union-attr]
    fields = {"text": PROMPT, "seed": 5, "temperature": 0.9, "max_tokens": 60, "ignore_eos": True}
    whole = await marked.stack.generate(**fields, sample_count=2)
    stop = " the"
    body = {"prompt": PROMPT, "seed": 5, "temperature": 0.9, "max_tokens": 60, "ignore_eos": True, "n": 2}
    for min_tokens in (0, 5, 20, 60):
        expected = []
        for token_ids in samples(whole):
            spared = len(tokenizer.decode(list(token_ids[:min_tokens])))
            text = tokenizer.decode(list(token_ids))
            ends = [end for end in range(spared + 1, len(text) + 1) if text[:end].endswith(stop)]
            expected.append((text[: ends[0] - len(stop)], "stop") if ends else (text, "length"))
        reply = await marked.ask("/v1/completions", **body, stop=stop, min_tokens=min_tokens)
        assert [(each["text"], each["finish_reason"]) for each in reply["choices"]] == expected
        first = await with_and_without(marked.stack, ignore_eos=True, stop=[stop], min_tokens=min_tokens)
        assert first.text == expected[0][0]
        sent = await marked.ask_bytes("/v1/completions", **body, stop=stop, min_tokens=min_tokens, stream=True)
        assert sum(map(len, pieces(sent))) == sum(len(text) for text, _ in expected)


def samples(answer: Answer) -> list[tuple[int, ...]]:
    """The token ids of each sample."""
    found: dict[int, list[int]] = {}
    for each in answer.rounds:
        found.setdefault(each.sample_index, []).extend(token.token_id for token in each.tokens)
    return [tuple(found[index]) for index in sorted(found)]


def pieces(sent: bytes) -> list[str]:
    """The pieces of text in a stream."""
    lines = (line.removeprefix("data: ") for line in sent.decode().splitlines() if line.startswith("data: {"))
    return [delta for line in lines for delta in deltas(json.loads(line))]


ASKED = {"messages": [{"role": "user", "content": PROMPT}]}
DOORS = [
    ("/v1/completions", {"prompt": PROMPT}, "stop", "stop"),
    ("/v1/completions", {"prompt": PROMPT, "n": 2}, "stop", "stop"),
    ("/v1/chat/completions", ASKED, "stop", "stop"),
    ("/v1/messages", ASKED, "stop_sequences", "stop_sequence"),
]


def choices(path: str, reply: dict[str, Any]) -> list[tuple[str, str, str | None]]:
    """Text, why it ended, and the string that ended it where that is reported."""
    if path == "/v1/messages":
        return [("".join(part["text"] for part in reply["content"]), reply["stop_reason"], reply["stop_sequence"])]
    texts = [each["text"] if "text" in each else each["message"]["content"] for each in reply["choices"]]
    return [(text, each["finish_reason"], None) for text, each in zip(texts, reply["choices"], strict=True)]


@pytest.mark.parametrize(("path", "fields", "stop_name", "reason"), DOORS)
async def test_every_door_ends_at_the_name_of_a_special_token(
    marked: RestStack, path: str, fields: dict[str, Any], stop_name: str, reason: str
) -> None:
    """Whole and streamed, for each answer of several; the name is not in the text."""
    body = {**fields, "temperature": 0.9 if "n" in fields else 0, "max_tokens": 60}
    body |= {} if path == "/v1/messages" else {"seed": 5}
    wholes = choices(path, await marked.ask(path, **body))
    cuts = choices(path, await marked.ask(path, **body, **{stop_name: ["no such text", MARK]}))
    for (whole, *_), (cut, why, stop) in zip(wholes, cuts, strict=True):
        assert whole.startswith(cut)
        assert len(cut) < len(whole)
        assert (why, stop) == (reason, MARK if path == "/v1/messages" else None)
    sent = await marked.ask_bytes(path, **body, **{stop_name: [MARK]}, stream=True)
    assert MARK.encode() not in sent.replace(f'"stop_sequence":"{MARK}"'.encode(), b"")
    assert reason.encode() in sent
    assert sum(map(len, pieces(sent))) == sum(len(cut) for cut, *_ in cuts)


def deltas(event: dict[str, Any]) -> list[str]:
    """The pieces of text in an event of any stream."""
    if event.get("type") == "content_block_delta":
        return [event["delta"]["text"]]
    return [each.get("text") or each.get("delta", {}).get("content") or "" for each in event.get("choices", [])]
