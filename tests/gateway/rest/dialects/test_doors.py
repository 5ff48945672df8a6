"""What each door gives of an answer with a form, with tools, with both, and with an end in the middle, for models in
the manner of the usual families.

The target says prepared answers whatever a grammar forbids, so each is checked against the grammar that it was given.
"""

from collections.abc import AsyncIterator
from itertools import count
from typing import Any

import pytest
import pytest_asyncio
from llguidance import LLMatcher, LLTokenizer
from support.models.chat_families import FAMILIES, Family
from support.rest.doors import CHAT_DOORS, TEXT_DOORS, Door, Question, Tool, chat, chat_stream, grpc_chat, messages
from support.services.reciting import END, RecitingStack, reciting_stack
from tokenizers import Tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = Tool("weather", CITY)
FORM = {"type": "object", "properties": {"name": {"type": "string"}, "n": {"type": "integer"}}, "required": ["name"]}
SHAPED, ROME, THOUGHT = '{"name": "☔", "n": 3}', {"city": "雪"}, "So ☔"
# What cannot be enforced, each for another reason, and the place that is at fault.
ODD: dict[str, tuple[dict[str, Any], str]] = {
    "look-ahead": ({"properties": {"city": {"type": "string", "pattern": "^(?=R).*$"}}}, "properties.city.pattern"),
    "look-behind in a list": (
        {"properties": {"city": {"type": "string"}, "all": {"type": "array", "items": {"pattern": "(?<=a)b"}}}},
        "properties.all.items.pattern",
    ),
    "bounds": ({"properties": {"n": {"type": "integer", "minimum": -1e308, "maximum": 1e308}}}, "properties.n.minimum"),
    "an unknown type": ({"properties": {"n": {"type": "float"}}}, "properties.n.type"),
    "no required": ({"properties": {"city": {"type": "string"}}, "required": None}, "required"),
    "no items": ({"properties": {"n": {"type": "array", "items": None}}}, "properties.n.items"),
    "no property": ({"properties": {"n": None}}, "properties.n"),
    "no reference": ({"properties": {"n": {"$ref": "#/$defs/none"}}}, "properties.n.$ref"),
    "what nobody can say": ({"properties": {"n": {"enum": []}}, "required": ["n"]}, "required"),
    "what nobody knows": ({"properties": {"n": {"not": {"type": "integer"}}}}, "properties.n.not"),
}
# What is known under another name, or says nothing: strict schemas may have it.
SAME: tuple[dict[str, Any], ...] = (
    {"propertyNames": {"type": "string"}, "additionalProperties": {"type": "string"}},
    {"propertyNames": {"type": "string", "enum": ["city"]}, "additionalProperties": {"type": "string"}},
    {"propertyNames": {"pattern": "^c"}},
    {"properties": {"city": {"type": "string", "not": False}}, "unevaluatedProperties": False},
    {"properties": {"city": {"type": "string"}, "all": {"type": "array", "uniqueItems": False, "contains": {}}}},
    {"properties": {"city": {"if": True, "then": {"type": "string"}}}, "dependentRequired": {}, "minProperties": 0},
    {"properties": {"n": {"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308}}},
    {"$schema": "https://example.com/none", "properties": {"city": {"type": "string", "description": "a city"}}},
)


class RunningFamily:
    """A running stack of a family, and the grammars that its answers were to follow."""

    def __init__(self, family: Family, stack: RecitingStack, tokenizer: Tokenizer) -> None:
        self.family, self.stack, self._tokenizer = family, stack, tokenizer
        self._ll = LLTokenizer(tokenizer.to_str(), eos_token=tokenizer.token_to_id(END))

    def allows(self, answer: str, *, is_open: bool = False) -> bool:
        """Whether the grammar of the last session takes an answer to its end, or is open for more if it is one."""
        matcher = LLMatcher(self._ll, self.stack.target.opens[-1].grammar)
        ids = self._tokenizer.encode(answer, add_special_tokens=False).ids
        return matcher.try_consume_tokens(ids) == len(ids) and (is_open or bool(matcher.is_accepting()))

    def answers(self, text: str) -> str:
        """What the model says to a text."""
        return answers_of(self.family)[text]


def answers_of(family: Family) -> dict[str, str]:
    """What the model says, by what the user says."""
    call = family.call("weather", ROME)
    return {
        "Shape it": family.thinking(THOUGHT, SHAPED),
        "Call it": family.thinking(THOUGHT, call),
        "Say it": family.thinking(THOUGHT, "Is ☔ 雪?"),
        "Raw": SHAPED,
    }


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=FAMILIES, ids=lambda each: each.name)
async def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RunningFamily]:
    """A stack for each family."""
    family, folder = request.param, tmp_path_factory.mktemp("family")
    answers = answers_of(family)
    # No texts to learn from, so that characters are cut into tokens of bytes.
    async with reciting_stack(
        folder,
        lambda prompt: answers[max(answers, key=prompt.rfind)],
        [],
        template=family.template,
        special=family.special,
        added=family.added,
        turn=family.turn,
        heads=family.heads,
        served_model_name="*",
    ) as stack:
        yield RunningFamily(family, stack, Tokenizer.from_file(str(folder / "tokenizer.json")))


@pytest.fixture(params=CHAT_DOORS, ids=lambda each: each.__name__)
def door(request: pytest.FixtureRequest) -> Door:
    return request.param  # type: ignore[no-any-return]


async def test_a_form_is_that_of_the_content_behind_reasoning(running: RunningFamily, door: Door) -> None:
    """Which the model may still do; and the form is enforced."""
    said = await door(running.stack, Question("Shape it", schema=FORM))
    assert not said.error
    assert (said.content, said.calls, said.is_cut) == (SHAPED, [], False)
    assert said.reasoning.strip() == (THOUGHT if running.family.ends else "")
    assert running.allows(running.answers("Shape it"))
    assert not running.allows(running.family.thinking(THOUGHT, "Ada"))
    assert not running.allows(running.family.thinking(THOUGHT, '{"n": 3}'))


async def test_an_answer_with_tools_and_a_form_is_a_call_or_the_form(running: RunningFamily, door: Door) -> None:
    """Where one must call it is a call."""
    both = {"tools": [WEATHER], "schema": FORM}
    called, shaped = running.answers("Call it"), running.answers("Shape it")
    if running.family.shows_tools:
        said = await door(running.stack, Question("Call it", **both))
        assert (said.content, said.calls, said.error) == ("", [("weather", ROME)], "")
        assert running.allows(called)
        said = await door(running.stack, Question("Shape it", **both))
        assert (said.content, said.calls) == (SHAPED, [])
        assert said.reasoning.strip() == (THOUGHT if running.family.ends else "")
        assert running.allows(shaped)
        assert not running.allows(running.family.thinking(THOUGHT, "Let me see."))
    said = await door(running.stack, Question("Call it", **both, must_call=True))
    assert (said.content, said.calls, said.error) == ("", [("weather", ROME)], "")
    assert running.allows(called)
    assert not running.allows(shaped)


@pytest.mark.parametrize("kind", ODD)
async def test_what_is_not_strict_is_kept_as_far_as_it_goes(running: RunningFamily, door: Door, kind: str) -> None:
    """The rest of it and the other tools are enforced; what is strict is refused by its tool and its place."""
    if running.family is not FAMILIES[0] and door is not chat:
        return
    odd, place = ODD[kind]
    tools = [WEATHER, Tool("other", odd)]
    said = await door(running.stack, Question("Call it", tools=tools, must_call=True))
    assert (said.calls, said.error) == ([("weather", ROME)], "")
    assert not running.allows(running.family.thinking(THOUGHT, running.family.call("weather", {})))
    said = await door(running.stack, Question("Shape it", schema={**FORM, "anyOf": [odd, {}]}))
    if door is messages and kind != "what nobody can say":
        # Anthropic's form is strict, and no field says so. Nobody has to say what another case allows.
        assert said.error.startswith("output_config.format.schema is ")
        assert f"anyOf.0.{place}" in said.error
    else:
        assert (said.content, said.error) == (SHAPED, "")
    if running.family is FAMILIES[0]:
        tools = [WEATHER, Tool("other", odd, strict=True)]
        said = await door(running.stack, Question("Call it", tools=tools, must_call=True))
        assert "tools.1" in said.error
        assert f".{place} is " in said.error


@pytest.mark.parametrize("number", range(len(SAME)))
async def test_what_says_the_same_in_other_words_is_enforced(running: RunningFamily, door: Door, number: int) -> None:
    """Also of a strict tool, whose annotations have any size."""
    if running.family is not FAMILIES[0] and door is not chat:
        return
    tools = [WEATHER, Tool("other", {"type": "object", **SAME[number]}, strict=True)]
    said = await door(running.stack, Question("Call it", tools=tools, must_call=True))
    assert (said.calls, said.error) == ([("weather", ROME)], "")


@pytest.mark.parametrize("text", ["Shape it", "Call it", "Say it"])
async def test_what_a_limit_cuts_off_is_the_beginning_of_the_whole(
    running: RunningFamily, door: Door, text: str
) -> None:
    """Without half a character, half a marker, or half a call."""
    if running.family is not FAMILIES[0] and door not in (chat_stream, grpc_chat):
        return
    tools = [WEATHER] if running.family.shows_tools else []
    asked: dict[str, Any] = {"schema": FORM} if text == "Shape it" else {"tools": tools}
    whole = await door(running.stack, Question(text, **asked))
    seen = set()
    for limit in count(1):
        said = await door(running.stack, Question(text, **asked, max_tokens=limit))
        if not said.is_cut:
            break
        assert whole.content.startswith(said.content)
        assert whole.reasoning.startswith(said.reasoning)
        assert said.calls in ([], whole.calls)
        seen.add(said.content)
    assert said == whole
    assert "\ufffd" not in "".join(seen)
    assert len(seen) > (3 if whole.content else 0)


@pytest.mark.parametrize("enter", TEXT_DOORS, ids=lambda each: each.__name__)
async def test_where_there_is_no_chat_all_of_an_answer_is_text(running: RunningFamily, enter: Door) -> None:
    """The form is that of all of it, and half a character is none either."""
    prompt = f"Raw{running.family.turn}{running.family.heads[0]}"
    for schema in (FORM, {**FORM, "anyOf": [ODD["look-ahead"][0], {}]}):
        said = await enter(running.stack, Question("", prompt, schema=schema))
        assert (said.content, said.error) == (SHAPED, "")
        assert running.allows(SHAPED)
        assert not running.allows(running.family.thinking(THOUGHT, SHAPED)) or not running.family.ends
    refused = await enter(running.stack, Question("", prompt, schema={**FORM, **ODD["look-ahead"][0]}, strict=True))
    assert "properties.city.pattern" in refused.error
    texts = [await enter(running.stack, Question("", prompt, max_tokens=limit)) for limit in range(1, 2 * len(SHAPED))]
    assert {said.is_cut for said in texts} == {True, False}
    assert all(SHAPED.startswith(said.content) for said in texts)
