"""Whatever guesses, alone or together: under `match` real services say what plain decoding says with the same seed.

Sixteen requests at once, of which half are greedy and half have prompts that repeat themselves. Everything is asked
twice, because a memory of the first answers proposes the whole second ones. One draft service has a model of random
weights, whose guesses are all wrong, and one has the target's own, whose guesses are all right.
"""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import tokenizers
from support.models.tiny_models import write_tiny_model
from support.stack import (
    DRAFT,
    PATIENT,
    TARGET,
    Answer,
    HaltedTarget,
    RunningStack,
    greedy_reference,
    running_stack,
    token_ids,
)

from gateway.lookup.datastore.build import build
from gateway.sessions import draft_team
from outrider.cli.bench.common import OPENINGS
from outrider.model_files.vocabulary import Vocabulary
from outrider.v1 import generation_service_pb2 as pb
from outrider.v1 import types_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")

VOCABULARY_SIZE = 4096
MAX_TOKENS = 24
TALES = OPENINGS[16:24]
REPEATED = tuple(f"{text} {text} {text}" for text in (" ".join(each.split()[:6]) for each in OPENINGS[8:16]))
PROMPTS = OPENINGS[:8] + REPEATED
TREES = types_pb2.TreeShape(max_children=4)
FIXED = types_pb2.TreeShape(expansions=[2, 2])
SHALLOW = types_pb2.TreeShape(max_depth=2)
DRAFTERS: Mapping[str, dict[str, Any]] = {
    "whoever the gateway likes": {},
    "whoever, with four guesses": {"draft_count": 4},
    "lookup": {"drafter": "lookup"},
    "lookup of eight": {"drafter": "lookup", "draft_count": 8},
    "model": {"drafter": "model", "draft_count": 4},
    "coupled": {"drafter": "coupled", "draft_count": 3},
    "sampled": {"drafter": "sampled"},
    "wide trees": {"drafter": "model", "draft_count": 8, "shape": TREES},
    "fixed trees": {"drafter": "model", "draft_count": 6, "shape": FIXED},
    "trees whose shape says their size": {"drafter": "model", "shape": FIXED},
    "shallow trees": {"drafter": "model", "shape": SHALLOW},
    "random weights": {"drafter": "random", "draft_count": 4},
    "the target's weights": {"drafter": "oracle", "draft_count": 4},
    "lookup and model": {"drafters": ["lookup", "model"]},
    "model and lookup, trees": {"drafters": ["model", "lookup"], "draft_count": 6, "shape": TREES},
    "two of one service": {"drafters": ["coupled", "sampled"], "draft_count": 4},
    "all": {"drafters": ["model", "random", "oracle", "lookup"], "draft_count": 4},
    "three drafts": {"drafters": ["random", "model", "oracle"], "draft_count": 6, "shape": FIXED},
}
RATIO, BLOCK = types_pb2.ACCEPTANCE_RULE_RATIO, types_pb2.ACCEPTANCE_RULE_BLOCK
LENIENT, TYPICAL = types_pb2.ACCEPTANCE_RULE_LENIENT, types_pb2.ACCEPTANCE_RULE_TYPICAL


def datastore(folder: Path) -> str:
    """A datastore of tales, each of which goes on as the target does when it is greedy."""
    tokenizer = tokenizers.Tokenizer.from_file(f"{TARGET}/tokenizer.json")
    prompts = [tokenizer.encode(text, add_special_tokens=False).ids for text in TALES]
    endings = greedy_reference(Path(TARGET), TALES, MAX_TOKENS)
    documents = [[*prompt, *ending] for prompt, ending in zip(prompts, endings, strict=True)]
    build(documents, Vocabulary.read(TARGET), folder / "tales", lambda _: None)
    return str(folder / "tales")


@asynccontextmanager
async def many_drafters(folder: Path) -> AsyncIterator[RunningStack]:
    """A gateway with a datastore and three draft services, none of which is ever too late."""
    further = {"random": str(write_tiny_model(folder / "random", "llama", VOCABULARY_SIZE)), "oracle": TARGET}
    gateway = {**PATIENT, "datastore": datastore(folder)}
    async with running_stack(TARGET, DRAFT, gateway=gateway, further_drafts=further) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningStack]:
    """One stack for all tests that end nothing, in which each drafter is waited for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draft_team, "MIN_GRACE_S", 60.0)
        async with many_drafters(tmp_path_factory.mktemp("drafters")) as running:
            yield running


async def ask(
    stack: RunningStack,
    salt: str,
    numbers: Sequence[int] = range(16),
    at_a_time: int = 16,
    own: Callable[[int], Mapping[str, Any]] = lambda _: {},
    **fields: Any,
) -> list[Answer]:
    """The answers to some of the prompts; every other one is greedy, and each has its own seed and its own fields."""
    slots = asyncio.Semaphore(at_a_time)
    fields = {"max_tokens": MAX_TOKENS, "ignore_eos": True, "cache_salt": salt, "return_rounds": True, **fields}

    async def answer(number: int) -> Answer:
        asked = {"text": PROMPTS[number], "seed": number, "temperature": float(number % 2), **fields, **own(number)}
        async with slots:
            return await stack.generate(**asked)

    return await asyncio.gather(*map(answer, numbers))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plain(stack: RunningStack) -> list[tuple[int, ...]]:
    """What is said without any guess."""
    answers = await ask(stack, "plain", enabled=False)
    assert sum(each.completion.speculation.draft_tokens for each in answers) == 0
    return token_ids(answers)


def check_books(answer: Answer) -> None:
    """What rounds and figures say of guesses fits together, and every row is reported exactly once."""
    figures, counted, accepted = answer.completion.speculation, Counter[str](), Counter[str]()
    for each in answer.rounds:
        facts = each.facts
        assert 0 <= facts.accepted_count <= facts.evaluated_count <= facts.draft_count
        assert bool(facts.evaluated_count) == bool(facts.draft_count)
        kept = [token for token in each.tokens if token.origin == pb.TOKEN_ORIGIN_ACCEPTED]
        assert len(kept) == facts.accepted_count
        assert sorted([token.row for token in (*kept, *each.rejected)]) == [*range(1, facts.draft_count + 1)]
        assert all(token.parent < token.row for token in each.rejected)
        counted.update(token.drafter for token in (*kept, *each.rejected))
        accepted.update(token.drafter for token in kept)
    assert figures.rounds == len(answer.rounds) - 1
    assert figures.drafts == sum(each.facts.draft_count > 0 for each in answer.rounds)
    assert figures.draft_tokens == counted.total()
    assert figures.accepted_tokens == accepted.total() <= figures.evaluated_tokens
    told = {each.drafter: (each.draft_tokens, each.accepted_tokens) for each in figures.drafters}
    assert told == {drafter: (count, accepted[drafter]) for drafter, count in counted.items()}
    usage = answer.completion.usage
    assert usage.accepted_prediction_tokens == accepted["prediction"]
    assert usage.rejected_prediction_tokens == counted["prediction"] - accepted["prediction"]


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTERS)
async def test_no_drafter_changes_a_token(stack: RunningStack, plain: list[tuple[int, ...]], name: str) -> None:
    """Sixteen at once, then again with what is remembered of them, then alone."""
    drafters = DRAFTERS[name]
    once, again = [await ask(stack, name, **drafters) for _ in range(2)]
    alone = await ask(stack, name, (6, 15), at_a_time=1, **drafters)
    assert token_ids(once) == token_ids(again) == plain
    assert token_ids(alone) == [plain[6], plain[15]]
    for answer in (*once, *again, *alone):
        check_books(answer)
    if "draft_count" in drafters or drafters.get("shape") == FIXED:
        # A row that several guess is reported as one's own, and lookups know what was said the first time.
        told = {each.drafter for answer in (*once, *again) for each in answer.completion.speculation.drafters}
        assert told >= {drafters.get("drafter", ""), *drafters.get("drafters", [])} - {""}


def predictions(plain: Sequence[tuple[int, ...]], number: int) -> dict[str, types_pb2.TokenIds]:
    """By what they are: the answer, another one, one that is right at first, and no text at all."""
    right, other, noise = plain[number], plain[(number + 2) % 16], random.Random(number)
    half = MAX_TOKENS // 2
    return {
        "right": types_pb2.TokenIds(token_ids=right),
        "other": types_pb2.TokenIds(token_ids=other),
        "half right": types_pb2.TokenIds(token_ids=right[:half] + other[half:]),
        "gap": types_pb2.TokenIds(token_ids=right[:half] + right[half + 3 :]),
        "noise": types_pb2.TokenIds(token_ids=[noise.randrange(VOCABULARY_SIZE) for _ in right]),
    }


@pytest.mark.parametrize("fields", [{"drafter": "lookup", "draft_count": 6}, {}, DRAFTERS["lookup and model"]])
@pytest.mark.slow
async def test_no_prediction_changes_a_token(
    stack: RunningStack, plain: list[tuple[int, ...]], fields: dict[str, Any]
) -> None:
    """Whatever is predicted; what is right is accepted where lookups alone guess, and counted as the request's."""
    for kind in predictions(plain, 0):
        told = await ask(
            stack,
            f"{kind} {fields}",
            own=lambda number, kind=kind: {"prediction_token_ids": predictions(plain, number)[kind]},
            **fields,
        )
        assert token_ids(told) == plain
        for answer in told:
            check_books(answer)
        if kind == "right" and "draft_count" in fields:
            assert sum(answer.completion.usage.accepted_prediction_tokens for answer in told) > 0


@pytest.mark.slow
async def test_a_datastore_proposes(stack: RunningStack) -> None:
    """How a tale went on, for drafters that go on with it and have no memory; its table, for those that leave it."""

    def reader(number: int) -> dict[str, str]:
        return {"text": TALES[number], "cache_salt": f"reader {number}"}

    numbers = range(len(TALES))
    plain = await ask(stack, "", numbers, own=reader, enabled=False)
    # Beside a draft, which makes every round an asked one: alone a target may be ahead of a test that looks.
    told = await ask(stack, "", numbers, own=reader, drafters=["random", "lookup"], draft_count=4)
    assert token_ids(told) == token_ids(plain)
    for answer in told:
        check_books(answer)
    greedy, sampled = [
        [each for answer in some for each in answer.completion.speculation.drafters] for some in (told[::2], told[1::2])
    ]
    accepted = sum(each.accepted_tokens for each in greedy if each.drafter == "datastore")
    assert accepted > len(TALES[::2]) * MAX_TOKENS // 2
    assert "table" in {each.drafter for each in sampled}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "name"),
    [
        *(
            pytest.param(rule, name, marks=marks)
            for rule, marks in ((RATIO, ()), (BLOCK, pytest.mark.grid))
            for name in ("lookup of eight", "model", "wide trees", "fixed trees", "whoever the gateway likes")
        ),
        *((rule, "all") for rule in (BLOCK, LENIENT, TYPICAL)),
        (RATIO, "all"),
        (BLOCK, "model and lookup, trees"),
    ],
)
async def test_other_rules_end_and_keep_their_books(
    stack: RunningStack, plain: list[tuple[int, ...]], rule: "types_pb2.AcceptanceRule.ValueType", name: str
) -> None:
    """Sixteen answers of full length; the greedy ones of the rules that keep the distribution are plain decoding's."""
    for _ in range(2):
        told = await ask(stack, f"{rule} {name}", rule=rule, **DRAFTERS[name])
        for number, answer in enumerate(told):
            assert len(answer.token_ids) == MAX_TOKENS
            check_books(answer)
            if rule in (RATIO, BLOCK) and number % 2 == 0:
                assert answer.token_ids == plain[number]


@pytest.mark.slow
async def test_deaths_of_either_service_change_no_token(tmp_path: Path) -> None:
    """The first draft dies twice and the target once under sixteen requests of all kinds; no process holds anything
    then.

    All blocks of all services are free at last, which the stack looks at when it is closed.
    """
    kinds = [*DRAFTERS.values()]
    long = {"max_tokens": 160}
    async with many_drafters(tmp_path) as stack:
        expected = token_ids(await ask(stack, "plain", enabled=False, **long))
        halted = HaltedTarget(stack)
        running = asyncio.create_task(ask(stack, "deaths", own=lambda number: kinds[number], **long))
        await halted.make(4)
        await stack.stop_draft()
        await halted.make(2)
        await stack.start_draft()
        await stack.restart_target()
        halted = HaltedTarget(stack)
        await halted.make(4)
        await stack.stop_draft()
        await halted.make(2)
        await stack.start_draft()
        assert not running.done()
        halted.let_go()
        told = await running
        assert token_ids(told) == expected
        assert sum(answer.completion.speculation.fallback_rounds for answer in told) > 0
        assert sum(answer.completion.survival.target_reopens for answer in told) > 0
        again = await ask(stack, "deaths", own=lambda number: kinds[number], **long)
        assert token_ids(again) == expected
        for answer in (*told, *again):
            check_books(answer)
