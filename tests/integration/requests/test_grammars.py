"""Answers under a grammar through real services: the same tokens with guesses and without, whatever happens."""

import asyncio
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from support.basics import slow
from support.models.tiny_models import write_tiny_model
from support.stack import DRAFT, PATIENT, TARGET, HaltedTarget, RunningStack, running_stack

from gateway.lookup import guesses
from gateway.lookup.guesses import GRAMMAR
from outrider.cli.bench.common import OPENINGS
from outrider.client import Answer, InvalidRequest, OutriderError, Speculation
from outrider.errors import NoTokenLeft
from outrider.model_files.tokenizer_files import load_tokenizer
from outrider.model_files.vocabulary import Vocabulary
from outrider.parameters import Rule
from outrider.token_tree import TreeShape

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "kind": {"enum": ["king", "queen", "fox"]},
        "gold": {"type": "integer", "minimum": 0, "maximum": 999},
        "friends": {"type": "array", "items": {"enum": ["bear", "wolf", "bird"]}, "maxItems": 3},
    },
    "required": ["name", "kind", "gold", "friends"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": " ?"},
}
GRAMMARS: dict[str, dict[str, Any]] = {
    "schema": {"json_schema": SCHEMA},
    "regex": {"regex": r"([a-z]{2,7} ){3,9}[a-z]{2,7}\."},
    "choices": {"choices": ["Once upon a time there was a king.", "Once upon a time there was a fox.", "No."]},
    "lark": {"lark": 'start: item ("," item)* "."\nitem: " " WORD (" of" item)?\nWORD: /[a-z]{3,8}/'},
    "gbnf": {"gbnf": 'root ::= "The " [a-z]+ " said: \\"" [a-z ,]+ "!\\""'},
    "object": {"json_schema": {"type": "object", "properties": {"tale": {"type": "string"}}, "required": ["tale"]}},
}
COUNTS = (1, 4, 8, None)
# The target's token for the letter y.
[YES] = load_tokenizer(TARGET).encode("y", add_special_tokens=False).ids


async def said(
    stack: RunningStack, prompts: Sequence[str], at_a_time: int = 4, **options: Any
) -> list[tuple[tuple[int, ...], ...]]:
    """The tokens of all samples of the answers to all prompts, in order; each prompt has a seed of its own."""
    slots = asyncio.Semaphore(at_a_time)

    async def answer(seed: int, prompt: str) -> tuple[tuple[int, ...], ...]:
        async with slots:
            found = await stack.client.generate(prompt, seed=seed, **{"max_tokens": 40} | options).result()
            return tuple(sample.token_ids for sample in found.samples)

    return await asyncio.gather(*(answer(seed, prompt) for seed, prompt in enumerate(prompts)))


def check_shape(name: str, answer: Answer) -> None:
    """An answer that ended by itself has its shape."""
    [sample] = answer.samples
    if sample.result.finish_reason != "eos":
        assert sample.result.finish_reason == "length"
        return
    given = GRAMMARS[name]
    if "json_schema" in given:
        jsonschema_rs.validate(given["json_schema"], json.loads(sample.text))
    elif "regex" in given:
        assert re.fullmatch(given["regex"], sample.text)
    elif "choices" in given:
        assert sample.text in given["choices"]


@pytest.mark.grid
@pytest.mark.parametrize("temperature", [1.0, 0.0])
async def test_guesses_change_no_token(temperature: float) -> None:
    """Six grammars, greedily and drawn, with chains of every length and trees, several at once."""
    async with running_stack() as stack:
        for name, grammar in GRAMMARS.items():
            options = {"temperature": temperature, **grammar}
            plain = await said(stack, OPENINGS[:3], speculation=Speculation(enabled=False), **options)
            for count in COUNTS:
                assert await said(stack, OPENINGS[:3], speculation=Speculation(draft_count=count), **options) == plain
            tree = Speculation(draft_count=12, drafter="model", shape=TreeShape())
            assert await said(stack, OPENINGS[:3], speculation=tree, **options) == plain
            check_shape(name, await stack.client.generate(OPENINGS[0], seed=0, max_tokens=40, **options).result())


@pytest.mark.slow
async def test_sixteen_at_once_say_what_each_says_alone() -> None:
    """With and without a grammar side by side, and samples of one request that share nothing."""
    async with running_stack() as stack:
        mixed = [*GRAMMARS.values(), {}, {"sample_count": 3, **GRAMMARS["regex"]}]
        alone = [await said(stack, OPENINGS[:2], at_a_time=1, **options) for options in mixed]
        together = await asyncio.gather(*(said(stack, OPENINGS[:2], at_a_time=2, **options) for options in mixed))
        assert together == alone
        assert len(set(alone[-1][0])) == 3


@pytest.mark.parametrize("rule", [Rule.MATCH, *slow(Rule.RATIO, Rule.BLOCK, Rule.LENIENT, Rule.TYPICAL)])
async def test_every_rule_keeps_to_the_grammar(rule: Rule) -> None:
    """Also those that are not exact, and with guesses of a draft that has not heard of it."""
    async with running_stack() as stack:
        for name, grammar in GRAMMARS.items():
            for seed in range(3):
                speculation = Speculation(rule=rule, draft_count=4)
                check_shape(
                    name,
                    await stack.client.generate(
                        OPENINGS[seed], seed=seed, max_tokens=48, speculation=speculation, **grammar
                    ).result(),
                )


@pytest.mark.slow
@pytest.mark.parametrize("who", ["target", "draft"])
async def test_a_grammar_survives_its_services(who: str) -> None:
    """A target that has never heard of the request replays its tokens; without a draft it goes on plainly."""
    options: dict[str, Any] = {"max_tokens": 60, "seed": 4, **GRAMMARS["object"]}
    async with running_stack(gateway=PATIENT) as stack:
        expected = await stack.client.generate(OPENINGS[0], **options).result()
        assert len(expected.token_ids) > 5 * (1 + 4)
        halted = HaltedTarget(stack, 5)
        stream = stack.client.generate(OPENINGS[0], speculation=Speculation(draft_count=4), **options)
        await anext(stream)
        await halted.make()
        if who == "draft":
            await stack.stop_draft()
            halted.let_go()
        else:
            await stack.restart_target()
        answer = await stream.result()
        assert answer.samples[0].token_ids == expected.samples[0].token_ids
        assert answer.result.target_reopens == (who == "target")
        assert (answer.result.speculation.fallback_rounds > 0) == (who == "draft")


@pytest.mark.slow
async def test_a_draft_without_a_tokenizer_guesses_without_a_grammar(tmp_path: Path) -> None:
    """It is right less often, and costs no token."""
    bare = tmp_path / "draft"
    shutil.copytree(DRAFT, bare)
    Vocabulary.read(bare).write(bare)
    (bare / "tokenizer.json").unlink()
    options: dict[str, Any] = {**GRAMMARS["schema"], "max_tokens": 40}
    async with running_stack() as stack:
        plain = await said(stack, OPENINGS[:3], speculation=Speculation(enabled=False), **options)
    async with running_stack(draft=str(bare)) as stack:
        assert (await stack.info(stack.draft)).grammar_engine == ""
        assert (await stack.info(stack.target)).grammar_engine.startswith("llguidance ")
        for rule in ("match", "block"):
            answers = await said(stack, OPENINGS[:3], speculation=Speculation(draft_count=4, rule=rule), **options)
            assert rule != "match" or answers == plain


@pytest.mark.slow
async def test_what_is_forced_is_proposed_without_a_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the gateway alone, and always accepted."""
    monkeypatch.setattr(guesses, "MAX_FORCED_S", 60.0)
    async with running_stack(draft=None) as stack:
        speculation = Speculation(drafter="lookup", draft_count=8)
        stream = stack.client.generate(
            "Once", max_tokens=60, temperature=0.0, speculation=speculation, **GRAMMARS["schema"]
        )
        answer = await stream.result()
        plain = await said(
            stack,
            ["Once"],
            speculation=Speculation(enabled=False),
            temperature=0.0,
            max_tokens=60,
            **GRAMMARS["schema"],
        )
        assert (answer.samples[0].token_ids,) == plain[0]
        [forced] = [each for each in answer.result.speculation.drafters if each.drafter == GRAMMAR]
        assert forced.accepted_tokens == forced.draft_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "field", "words"),
    [
        ({"json_schema": "{"}, "constraint.json_schema", "JSON"),
        ({"json_schema": {"type": "object", "not": {}}}, "constraint.json_schema", "not"),
        ({"regex": "(a"}, "constraint.regex", "regex parse error"),
        ({"choices": []}, "constraint.choices", "none of them empty"),
        ({"regex": "a", "ignore_eos": True}, "sampling.ignore_eos", "constraint.regex"),
        ({"regex": "a", "lark": "start: x"}, "lark", "absent beside regex"),
        ({"regex": "a" * 9000}, "constraint.regex", "at most 8192"),
    ],
)
async def test_what_cannot_be_enforced_is_refused_by_name(options: Mapping[str, Any], field: str, words: str) -> None:
    async with running_stack(draft=None) as stack:
        with pytest.raises(InvalidRequest, match=re.escape(words)) as refused:
            await stack.client.generate("Once", **options).result()
        assert refused.value.metadata["field"] == field
        # And others are served.
        assert (await said(stack, ["Once"], max_tokens=2))[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"choices": ["fox"], "banned_words": ["fox", "f", "fo"]},
            "no token may follow the 0 of the answer: constraint.choices, banned_words together leave none",
        ),
        (
            {"regex": "(y){7}z", "banned_words": ["z", "yz"]},
            "of the answer: constraint.regex, banned_words together leave none",
        ),
        (
            {"regex": "yz?", "banned_words": ["z", "yz"], "min_tokens": 5},
            "of the answer: constraint.regex, banned_words, sampling.min_tokens together leave none",
        ),
        (
            {"lark": 'start: "y"', "stop_token_ids": [YES]},
            "no token may follow the 0 of the answer: constraint.lark, stop_token_ids together leave none",
        ),
    ],
)
async def test_a_dead_end_names_what_has_left_nothing(options: Mapping[str, Any], sentence: str) -> None:
    """The same tokens and the same sentence, with guesses and without."""
    async with running_stack() as stack:
        ends = []
        for speculation in (Speculation(enabled=False), Speculation(draft_count=8), Speculation()):
            tokens: list[int] = []
            stream = stack.client.generate("Once", temperature=0.0, max_tokens=30, speculation=speculation, **options)
            with pytest.raises(NoTokenLeft) as ended:
                await collect(stream, tokens)
            assert sentence in str(ended.value)
            assert f"follow the {len(tokens)} of the answer" in str(ended.value)
            ends.append(tokens)
        assert ends[0] == ends[1] == ends[2]
        # A bias forbids nothing.
        biased = {"choices": ["y"], "logit_bias": {YES: -100.0}}
        assert (await stack.client.generate("Once", max_tokens=9, **biased).result()).text == "y"


async def collect(stream: Any, tokens: list[int]) -> None:
    """Adds the tokens of a stream as they come; raises what ends it."""
    async for event in stream:
        tokens += [token.token_id for token in event.tokens]


@pytest.mark.slow
async def test_an_answer_that_cannot_go_on_ends_with_a_reason() -> None:
    """A word that the grammar wants and the request bans: never a silent end."""
    async with running_stack() as stack:
        words = "no token may follow the 0 of the answer: constraint.choices, banned_words together leave none"
        with pytest.raises(NoTokenLeft, match=words):
            await stack.client.generate("Once", choices=["fox"], banned_words=["fox", "f", "fo", "o", "x"]).result()
        # An end that would come too soon may come where nothing else is left.
        [sample] = (await stack.client.generate("Once", choices=["fox"], min_tokens=20, max_tokens=30).result()).samples
        assert sample.text == "fox"


async def test_a_vocabulary_of_single_bytes_is_enough(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny", "llama", vocab_size=257)
    async with running_stack(str(model), None, dtype="float32") as stack:
        [sample] = (await stack.client.generate("ab", regex="[xyz]{5}", max_tokens=9).result()).samples
        assert re.fullmatch("[xyz]{5}", sample.text)
        with pytest.raises(OutriderError):
            await stack.client.generate("ab", regex="(", max_tokens=9).result()
