"""Requests of every kind over both surfaces, read piece by piece and held against what plain decoding says.

Knows no faults: what a client is promised is the same whatever happens to its services.
"""

import json
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import grpc
import httpx
from support.grid import BANNED_WORDS, MATCH, fields_of, is_greedy, rows
from support.rest.rest_rows import body_of
from support.rest.rest_stack import COMPLETIONS
from support.stack import request_of

from outrider.cli.bench.common import OPENINGS
from outrider.rpc.errors import error_from
from outrider.v1 import generation_service_pb2 as pb
from outrider.v1 import types_pb2
from outrider.v1.generation_service_pb2_grpc import GenerationServiceStub

# Longer than those of the grid, so that there is a middle of an answer to be hit in.
MAX_TOKENS = 96
# Half of the prompts begin with the same hundreds of tokens.
SHARED = " ".join(OPENINGS[:16])
PROMPTS = (*OPENINGS[16:24], *(f"{SHARED} {opening}" for opening in OPENINGS[24:32]))
SALTS = ("", "one", "two")
TREE = types_pb2.TreeShape(max_depth=4, max_children=3)
# What the rows of the grid do not have: lookups, several drafters, trees, predictions and grammars.
FURTHER: tuple[dict[str, Any], ...] = (
    {"drafter": "lookup"},
    {"drafter": "lookup", "draft_count": 6, "prediction_text": f"{OPENINGS[0]} three sons"},
    {"drafters": ["model", "lookup"], "draft_count": 4},
    {"drafter": "model", "draft_count": 12, "shape": TREE},
    {"constraint": pb.Constraint(regex=r"([a-z]{2,7} ){9,24}[a-z]{2,7}\.")},
    {"constraint": pb.Constraint(regex=r"([a-z]{2,7} ){9,24}[a-z]{2,7}\."), "draft_count": 4, "drafter": "model"},
    {"constraint": pb.Constraint(lark='start: item ("," item)* "."\nitem: " " WORD (" of" item)?\nWORD: /[a-z]{3,8}/')},
    {"constraint": pb.Constraint(choices=pb.Choices(texts=[f"{opening}, once" for opening in OPENINGS[:4]]))},
    {"stop": [" and the"], "banned_words": BANNED_WORDS, "draft_count": 4},
)


@cache
def requests() -> Sequence[Mapping[str, Any]]:
    """The fields of every request that there is: all pairs of what the grid knows under each exact rule, and more."""
    grid = [fields_of(row) for rule in ("match", "ratio", "block") for row in rows(rule)]
    further = [
        {**each, "temperature": temperature, "seed": 17 + number, "max_tokens": MAX_TOKENS, "text": ""}
        for number, each in enumerate(FURTHER)
        for temperature in (0.0, 0.9)
    ]
    found = []
    for number, fields in enumerate([*grid, *further]):
        changed = {"cache_salt": SALTS[number % len(SALTS)]}
        if "text" in fields:
            changed["text"] = PROMPTS[number % len(PROMPTS)]
        if fields["max_tokens"] > 1:
            changed["max_tokens"] = MAX_TOKENS
        found.append({**fields, **changed})
    return found


def has_one_answer(fields: Mapping[str, Any]) -> bool:
    """Whether plain decoding with this seed says the same token for token; else only the distribution is promised."""
    return fields.get("rule", MATCH) == MATCH or is_greedy(fields)


class Piece(NamedTuple):
    """What one message brought to a sample."""

    index: int
    token_ids: Sequence[int]
    has_ended: bool


Pieces = AsyncGenerator[Piece, None]


@dataclass
class Gateway:
    """The clients of one gateway, and what its answers said they had survived."""

    stub: GenerationServiceStub
    http: httpx.AsyncClient
    survived: Counter[str] = field(default_factory=Counter)

    async def over_grpc(self, fields: Mapping[str, Any]) -> Pieces:
        """Raises the OutriderError that ended the call, AssertionError about a gap, and ends it when it is closed."""
        call = self.stub.Generate(request_of(**fields))
        begun: dict[int, int] = {}
        counts: Counter[int] = Counter()
        try:
            async for message in call:
                if message.HasField("round"):
                    facts, index = message.round.facts, message.round.sample_index
                    place = begun.setdefault(index, facts.base_len) + counts[index]
                    assert facts.base_len == place, f"a round begins at {facts.base_len} and not at {place}"
                    counts[index] += len(message.round.tokens)
                    yield Piece(index, [token.token_id for token in message.round.tokens], has_ended=False)
                else:
                    told, index = message.completion, message.completion.sample_index
                    assert told.usage.completion_tokens == counts[index], "other tokens were counted than came"
                    assert begun[index] == told.usage.prompt_tokens, "the answer does not begin behind the prompt"
                    self.survived["target_reopens"] += told.survival.target_reopens
                    self.survived["fallback_rounds"] += told.speculation.fallback_rounds
                    yield Piece(index, (), has_ended=True)
        except grpc.aio.AioRpcError as error:
            raise error_from(error) from None
        finally:
            call.cancel()

    async def over_rest(self, fields: Mapping[str, Any]) -> Pieces:
        """A stream of events. Raises AssertionError about an error, and about one that ends without its last word."""
        body = {**body_of(fields), "return_token_ids": True, "stream": True, "stream_options": {"include_usage": True}}
        count, chunk, is_done = 0, {}, False
        async with self.http.stream("POST", COMPLETIONS, json=body) as reply:
            assert reply.status_code == 200, await reply.aread()
            async for line in reply.aiter_lines():
                if not line.startswith("data: "):
                    continue
                assert not is_done, f"{line} came behind the end"
                is_done = line == "data: [DONE]"
                if not is_done:
                    chunk = json.loads(line.removeprefix("data: "))
                    assert "error" not in chunk, line
                    for choice in chunk["choices"]:
                        count += len(choice["token_ids"])
                        yield Piece(choice["index"], choice["token_ids"], choice["finish_reason"] is not None)
        assert is_done, "the stream has no end"
        assert chunk["usage"]["completion_tokens"] == count, "other tokens were counted than came"

    async def over_rest_whole(self, fields: Mapping[str, Any]) -> Pieces:
        """An answer that comes at once."""
        reply = await self.http.post(COMPLETIONS, json={**body_of(fields), "return_token_ids": True})
        assert reply.status_code == 200, reply.text
        answer = reply.json()
        for choice in answer["choices"]:
            yield Piece(choice["index"], choice["token_ids"], choice["finish_reason"] is not None)
        count = sum(len(choice["token_ids"]) for choice in answer["choices"])
        assert answer["usage"]["completion_tokens"] == count, "other tokens were counted than came"


SURFACES = {"gRPC": Gateway.over_grpc, "REST, streamed": Gateway.over_rest, "REST, whole": Gateway.over_rest_whole}


@dataclass
class Reading:
    """What has come of one answer, and what it has to be: None where only its distribution is promised."""

    expected: Sequence[Sequence[int]] | None
    said: dict[int, list[int]] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)

    def take(self, piece: Piece) -> None:
        """Fails about a wrong token as soon as it comes, and so about one that is lost or comes twice."""
        assert piece.index not in self.ended, f"sample {piece.index} goes on behind its end"
        said = self.said.setdefault(piece.index, [])
        said += piece.token_ids
        if piece.has_ended:
            self.ended.add(piece.index)
        if self.expected is not None:
            expected = list(self.expected[piece.index])
            right = expected if piece.has_ended else expected[: len(said)]
            # What came before was right.
            came = slice(len(said) - len(piece.token_ids), None)
            differs = f"sample {piece.index} says {said[came]} and not {right[came]} from token {came.start} on"
            assert said == right, differs

    def check_whole(self, fields: Mapping[str, Any]) -> None:
        """Fails unless every sample of the request has come to its end."""
        wanted = set(range(fields.get("sample_count", 1)))
        assert self.ended == self.said.keys() == wanted, f"only samples {self.ended} have an end"
