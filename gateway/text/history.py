"""Conversations as clients keep them, in words that a chat template takes.

Clients send back what they have, of other servers' answers too, and a template takes what its makers thought of. Rules
before the first answer are one message. Of everything else there are ways to say the same otherwise, which are tried
where the template refuses a conversation or leaves something of it out.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import Any, Self, TypeAlias

RULES, SIDES = ("system", "developer"), ("user", "assistant")
PLAIN_ID = re.compile(r"[a-zA-Z0-9]{9}")
# Fields of chat's messages that are named where they are said otherwise.
CALLS, CALL_ID, CONTENT = "messages.tool_calls", "messages.tool_call_id", "messages.content"
# Names of reasoning in messages.
REASONING = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True, slots=True)
class PastTurn:
    """A message as templates take it, and the number of the client's message that it comes from; `is_made` says that it
    was said otherwise there.
    """

    number: int
    message: Mapping[str, Any]
    is_made: bool = False

    @property
    def role(self) -> str:
        """Role of who speaks."""
        return str(self.message.get("role"))

    @property
    def content(self) -> str:
        """Text of the message; none is empty."""
        return str(self.message.get("content") or "")

    @property
    def calls(self) -> Sequence[Mapping[str, Any]]:
        """Calls of the message."""
        return self.message.get("tool_calls") or ()

    def having(self, **fields: object) -> Self:
        """The turn with other fields; None takes a field away."""
        changed = {**self.message, **fields}
        message = {name: value for name, value in changed.items() if name not in fields or value is not None}
        return replace(self, message=message, is_made=True)


Turns: TypeAlias = list[PastTurn]
# Turns in other words, and the fields that are named then.
Way: TypeAlias = tuple[Callable[[Turns], Turns], Sequence[str]]


def begun(messages: Sequence[Mapping[str, Any]], *, knows_developers: bool) -> Turns:
    """The turns of a conversation, whose rules before the first answer are one message, the first."""
    turns = [PastTurn(number, message) for number, message in enumerate(messages)]
    if not knows_developers:
        turns = [each.having(role="system") if each.role == "developer" else each for each in turns]
    first_answer = next((place for place, each in enumerate(turns) if each.role == "assistant"), len(turns))
    rules = [each for each in turns[:first_answer] if each.role in RULES]
    if not rules or (len(rules) == 1 and turns[0] is rules[0]):
        return turns
    text = "\n\n".join(each.content for each in rules if each.content)
    others = [each for each in turns[:first_answer] if each.role not in RULES]
    return [rules[0].having(content=text), *others, *turns[first_answer:]]


def told(turns: Turns, marks: tuple[str, str]) -> Iterator[tuple[Turns, Collection[str]]]:
    """The turns, and then in other words, with the fields that are named then; first those with the fewest changes, and
    calls as text at last. One change, two or all: thousands of turns are rendered each time.

    `marks` stand around calls in text.
    """
    yield turns, ()
    calls_said: Way = (partial(_calls_said, marks=marks), [CALLS])
    ways: list[Way] = [
        (_first_rules_asked, ()),
        (_later_rules_asked, ()),
        (_in_turn, ()),
        (_one_call_each, [CALLS]),
        (_plain_ids, [CALL_ID]),
        (_lone_results_asked, [CALL_ID]),
    ]
    fitting = [each for each in ways if each[0](turns) != turns]
    some = [chosen for count in (1, 2) for chosen in combinations(fitting, count)]
    several = [*some, tuple(fitting)] if len(fitting) > 2 else some
    if calls_said[0](turns) != turns:
        several += [(*chosen, calls_said) for chosen in [(), *several]]
    for chosen in several:
        found = turns
        for way, _ in chosen:
            found = way(found)
        yield found, [name for _, named in chosen for name in named]


def marked(turns: Turns) -> tuple[Turns, dict[str, PastTurn], dict[str, PastTurn]]:
    """The turns with a word of its own for each text and each name of a call, and the turns of these words."""
    texts, calls, found = dict[str, PastTurn](), dict[str, PastTurn](), []
    for place, turn in enumerate(turns):
        message = dict(turn.message)
        if turn.content.strip():
            message["content"] = f"text{place}z"
            texts[f"text{place}z"] = turn
        if turn.calls:
            names = [f"call{place}x{number}z" for number in range(len(turn.calls))]
            calls |= dict.fromkeys(names, turn)
            message["tool_calls"] = [
                {**call, "function": {**call["function"], "name": name}}
                for call, name in zip(turn.calls, names, strict=True)
            ]
        found.append(replace(turn, message=message))
    return found, texts, calls


def are_shown(turns: Turns, prompt: str) -> bool:
    """Whether all texts stand in a prompt in order, and nothing but texts would have to; quick, and rarely wrong."""
    place = 0
    for turn in turns:
        text = turn.content.strip()
        place = prompt.find(text, place)
        if place < 0 or turn.calls:
            return False
        place += len(text)
    return True


def _first_rules_asked(turns: Turns) -> Turns:
    """Rules before all else as the beginning of what the user says first, because some templates know none."""
    if turns[0].role not in RULES:
        return turns
    if len(turns) > 1 and turns[1].role == "user":
        return [turns[1].having(content=f"{turns[0].content}\n\n{turns[1].content}"), *turns[2:]]
    return [turns[0].having(role="user"), *turns[1:]]


def _in_turn(turns: Turns) -> Turns:
    """What one side says in several messages as one, because some templates want user and assistant by turns."""
    found: Turns = []
    for turn in turns:
        last = found[-1] if found else None
        if last is not None and last.role == turn.role and turn.role in SIDES and not last.calls:
            joined = {**last.message, **turn.message}
            if last.message.get("name") != turn.message.get("name"):
                joined["name"] = None
            joined["content"] = "\n".join(filter(None, [last.content, turn.content]))
            found[-1] = last.having(**joined)
        else:
            found.append(turn)
    return found


def _later_rules_asked(turns: Turns) -> Turns:
    """Rules after an answer as the user's text, because few templates have a place for them there."""
    return _joined(
        each.having(role="user") if place and each.role in RULES else each for place, each in enumerate(turns)
    )


def _one_call_each(turns: Turns) -> Turns:
    """Each call in a turn of its own, with its results after it."""
    found: Turns = []
    place = 0
    while place < len(turns):
        turn, place = turns[place], place + 1
        if len(turn.calls) < 2:
            found.append(turn)
            continue
        end = next((number for number in range(place, len(turns)) if turns[number].role != "tool"), len(turns))
        results, place = turns[place:end], end
        for number, call in enumerate(turn.calls):
            said = turn.having(content="", **dict.fromkeys(REASONING)) if number else turn
            found.append(said.having(tool_calls=[call]))
            # Those without an id come in the order of the calls.
            answers = [each for each in results if each.message.get("tool_call_id") == call.get("id")] or [
                each for each in results[:1] if each.message.get("tool_call_id") is None
            ]
            found += answers
            results = [each for each in results if each not in answers]
        found += results
    return found


def _plain_ids(turns: Turns) -> Turns:
    """Ids of nine letters and digits, which some templates want, in the place of all others."""
    ids: dict[object, str] = {}
    found, pending = [], list[str]()
    for turn in turns:
        if turn.calls:
            pending = []
            for call in turn.calls:
                given = call.get("id")
                known = given if isinstance(given, str) and PLAIN_ID.fullmatch(given) else f"call{len(ids):05d}"
                ids[len(ids) if given is None else given] = known
                pending.append(known)
            calls = [{**call, "id": each} for call, each in zip(turn.calls, pending, strict=True)]
            found.append(turn if calls == [*turn.calls] else turn.having(tool_calls=calls))
        elif turn.role == "tool":
            given = turn.message.get("tool_call_id")
            known = ids.get(given) or (pending[0] if pending else f"call{len(ids):05d}")
            pending = [each for each in pending if each != known]
            found.append(turn if known == given else turn.having(tool_call_id=known))
        else:
            found.append(turn)
    return found


def _lone_results_asked(turns: Turns) -> Turns:
    """Results of calls that are not there as the user's text; one that does not say of which call has the next one's
    id.
    """
    found, pending = [], list[object]()
    for turn in turns:
        pending += [call.get("id") for call in turn.calls]
        given = turn.message.get("tool_call_id")
        if turn.role == "tool" and given is None and pending and pending[0] is not None:
            found.append(turn.having(tool_call_id=pending.pop(0)))
        elif turn.role == "tool" and given not in pending:
            found.append(_asked(turn, ""))
        else:
            pending = [each for each in pending if turn.role != "tool" or each != given]
            found.append(turn)
    return _joined(found)


def _calls_said(turns: Turns, marks: tuple[str, str]) -> Turns:
    """Calls as the assistant's text, and their results as the user's."""
    found, names = [], dict[object, str]()
    for turn in turns:
        if turn.calls:
            names |= {call.get("id"): call["function"]["name"] for call in turn.calls}
            functions = [call["function"] for call in turn.calls]
            texts = [marks[0] + json.dumps(each, ensure_ascii=False) + marks[1] for each in functions]
            found.append(turn.having(content="\n".join([*filter(None, [turn.content]), *texts]), tool_calls=None))
        elif turn.role == "tool":
            found.append(_asked(turn, names.get(turn.message.get("tool_call_id"), "")))
        else:
            found.append(turn)
    return _joined(found)


def _asked(result: PastTurn, name: str) -> PastTurn:
    name = str(result.message.get("name") or name or "a tool")
    return replace(result, message={"role": "user", "content": f"Result of {name}:\n{result.content}"}, is_made=True)


def _joined(turns: Iterable[PastTurn]) -> Turns:
    """The turns, in which what was made the user's text is one with what the user says around it."""
    found: Turns = []
    for turn in turns:
        last = found[-1] if found else None
        if last is not None and last.role == turn.role == "user" and (last.is_made or turn.is_made):
            found[-1] = last.having(content=f"{last.content}\n{turn.content}")
        else:
            found.append(turn)
    return found
