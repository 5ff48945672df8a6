"""The form of an answer, compiled: what was asked for, or as much of it as can be enforced.

What a client marked as strict is enforced as it is, or is an error that names the place at fault. Of all else the
places at fault are left out: in the tools one by one, and in the form of the text.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gateway.generation.request import GenerationRequest
from gateway.sessions.peer import ModelInfo
from gateway.text.tokenizer import Tokenizer
from gateway.tools.call_grammar import CallRules, OfferedTool, answer_constraint
from gateway.tools.schemas import NAMED, FaultSearch, Place, at, plain, size_of
from outrider.constraint import Constraint, ConstraintKind
from outrider.errors import Field, InvalidRequest
from outrider.grammar import Grammar, GrammarRefused, canonical

# Compilations of a request, each of less than a millisecond as a rule, that look for what is at fault.
MAX_TRIES = 256


@dataclass(frozen=True, slots=True)
class AnswerShape:
    """Form of an answer as it is enforced, and its grammar for a new session."""

    constraint: Constraint
    grammar: Grammar


async def answer_shape(
    request: GenerationRequest, tokenizer: Tokenizer, target: ModelInfo, ends: frozenset[int], salt: bytes
) -> AnswerShape | None:
    """The form of the answer to a request, None where it may be anything; `ends` are the request's own.

    Raises InvalidRequest about what cannot be enforced, or not together with the rest of the request.
    """
    shape = request.constraint
    if shape is not None and shape.kind is ConstraintKind.JSON_SCHEMA:
        shape = shape.with_schema(plain(shape.schema))
    maker = _Maker(request, tokenizer, target, salt)
    constraint = maker.joined(request.rules.tools, shape)
    if constraint is None:
        return None
    if not target.grammar_engine:
        raise InvalidRequest(constraint.field, "present", "absent: the target serves no grammars")
    if request.beam_search is not None:
        raise InvalidRequest(constraint.field, "present", ("absent with ", Field("beam_search")))
    if request.sampling.ignore_eos:
        raise InvalidRequest("sampling.ignore_eos", True, ("false with ", Field(constraint.field)))
    if not target.eos_token_ids and not ends:
        limit = ("absent without ", Field("stop_token_ids"), ", for the model has no end of its own")
        raise InvalidRequest(constraint.field, "present", limit)
    if shape is not None and shape.whitespace:
        # Alone first, for a fault in it would be one of the schema otherwise.
        alone = Constraint(ConstraintKind.REGEX, shape.whitespace, shape.whitespace_field)
        await maker.compiled(alone)
    try:
        return AnswerShape(constraint, await maker.compiled(constraint))
    except InvalidRequest:
        return await maker.without_faults(shape)


class _Maker:
    """Makes the grammar of one request."""

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer, target: ModelInfo, salt: bytes) -> None:
        self._reading, self._rules = request.reading, request.rules
        self._tokenizer, self._ends, self._salt = tokenizer, target.eos_token_ids, salt
        self._search = FaultSearch(MAX_TRIES)
        self._unkept: list[str] = []

    def joined(self, tools: Sequence[OfferedTool], shape: Constraint | None) -> Constraint | None:
        """Calls of the tools and the form of the text in one constraint."""
        rules = replace(self._rules, tools=tuple(tools))
        return answer_constraint(self._reading, rules, self._tokenizer.added_tokens, shape)

    async def compiled(self, constraint: Constraint) -> Grammar:
        """Grammar of a constraint; raises InvalidRequest."""
        text = canonical(constraint)
        try:
            return await self._tokenizer.grammar(text, self._ends, self._salt)
        except (GrammarRefused, ValueError) as error:
            raise constraint.refused(error) from None

    async def without_faults(self, shape: Constraint | None) -> AnswerShape:
        """Grammar of as much as can be enforced; raises InvalidRequest about what must be and cannot."""
        tools = [await self._kept_tool(tool) for tool in self._rules.tools]
        if shape is not None and not self._rules.needs_call and (reason := await self._fault(shape)):
            shape = await self._kept_shape(shape, reason)
        # Each alone can be enforced; together they may be too much.
        largest = sorted(range(len(tools)), key=lambda number: -size_of(tools[number].parameters))
        emptied = (number for number in largest if not tools[number].strict)
        while True:
            constraint = self.joined(tools, shape)
            if constraint is None:
                raise AssertionError("a form that was there is gone")
            constraint = replace(constraint, unkept=tuple(dict.fromkeys(self._unkept)))
            try:
                return AnswerShape(constraint, await self.compiled(constraint))
            except InvalidRequest:
                number = next(emptied, None)
                if number is None:
                    raise
                self._unkept += tools[number].parameters
                tools[number] = replace(tools[number], parameters={})

    async def _fault(self, constraint: Constraint) -> str | None:
        try:
            return await self._tokenizer.grammar_fault(canonical(constraint), self._ends)
        except ValueError as error:
            return str(error)

    async def _kept_tool(self, tool: OfferedTool) -> OfferedTool:
        """A tool with the parameters that can be enforced; raises InvalidRequest about a fault of a strict one."""
        rules = CallRules((tool,), needs_call=True, max_calls=1)

        async def fault(parameters: dict[str, Any]) -> str | None:
            one = replace(rules, tools=(replace(tool, parameters=parameters),))
            constraint = answer_constraint(self._reading, one, self._tokenizer.added_tokens)
            return None if constraint is None else await self._fault(constraint)

        parameters = dict(tool.parameters)
        if await fault(parameters) is None:
            return tool
        kept, faults = await self._enforceable(parameters, fault, is_strict=tool.strict)
        if tool.strict and faults:
            place, reason = faults[0]
            field = ".".join(map(str, (tool.field, *place)))
            # Where in the grammar, which the client has not written, says nothing.
            reason = reason.rpartition("failed to compile JSON schema: ")[2]
            raise InvalidRequest(field, at(parameters, place), f"one that can be enforced: {reason}")
        return replace(tool, parameters=kept)

    async def _kept_shape(self, shape: Constraint, reason: str) -> Constraint:
        """A form with as much of its schema as can be enforced; raises InvalidRequest about any fault of others."""
        if shape.kind is not ConstraintKind.JSON_SCHEMA:
            raise shape.refused(GrammarRefused(reason))

        async def fault(schema: dict[str, Any]) -> str | None:
            return await self._fault(shape.with_schema(schema))

        kept, faults = await self._enforceable(shape.schema, fault, is_strict=not shape.is_lenient)
        if not shape.is_lenient:
            where = f" (at {'.'.join(map(str, faults[0][0]))})" if faults else ""
            raise shape.refused(GrammarRefused(f"{reason}{where}"))
        return shape.with_schema(kept)

    async def _enforceable(
        self, schema: dict[str, Any], fault: Callable[[dict[str, Any]], Awaitable[str | None]], *, is_strict: bool
    ) -> tuple[dict[str, Any], list[tuple[Place, str]]]:
        kept, faults = await self._search.enforceable(schema, fault, first_only=is_strict)
        self._unkept += (_keyword(place) for place, _ in faults if at(schema, place) is not None)
        return kept, faults


def _keyword(place: Place) -> str:
    """Keyword of a place, which may be that of an entry of its value."""
    is_entry = isinstance(place[-1], int) or place[-2:-1] in {(name,) for name in NAMED}
    return str(place[-2] if is_entry else place[-1])
