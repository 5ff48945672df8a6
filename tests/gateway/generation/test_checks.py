"""Validation of requests: what is refused, in which words, and what is filled in."""

from dataclasses import replace
from pathlib import Path

import pytest

from gateway.generation.checks import check_request
from gateway.generation.request import CheckedRequest, GenerationRequest, Offers
from gateway.rounds.round import Place
from gateway.sessions.peer import ModelInfo
from gateway.text.tokenizer import Tokenizer
from outrider.beams import BeamSearch
from outrider.constraint import Constraint, ConstraintKind
from outrider.errors import InvalidRequest, PromptTooLong
from outrider.grammar import ENGINE
from outrider.parameters import Acceptance, GenerationDefaults, Rule, SamplingParameters
from outrider.token_tree import TreeShape

TOKENIZER = Tokenizer(str(Path(__file__).resolve().parents[3] / "models" / "target"))
TARGET = ModelInfo("target", 1, "model", "hash", "numerics", 1024, 4096, (), frozenset({0}), 8, 0, 32_768, {})
OFFERS = Offers({"model": frozenset(Rule), "coupled": frozenset({Rule.MATCH})}, {"hosted": frozenset(Rule)})
REQUEST = GenerationRequest(text="Once upon a time")


async def check(request: GenerationRequest) -> CheckedRequest:
    """The request with these limits."""
    return await check_request(request, TOKENIZER, TARGET, OFFERS)


async def test_defaults_are_filled_in() -> None:
    """A bare text gets 128 tokens, a seed, the model's EOS and the gateway's own choice of K."""
    request = await check(REQUEST)
    assert request.spec.token_ids == await TOKENIZER.encode("Once upon a time")
    assert request.spec.max_len == request.spec.prompt_len + 128
    assert request.spec.eos_token_ids == {0}
    # What a number of JavaScript holds.
    assert 0 <= request.spec.seed < 2**53
    assert request.draft_count is None


RECOMMENDING = replace(TARGET, defaults=GenerationDefaults(temperature=0.2, top_p=0.9, top_k=40, max_tokens=200))


async def test_what_a_request_does_not_say_is_the_models() -> None:
    """Each value for itself, and one that was said counts also where it is the neutral one."""
    said = SamplingParameters(temperature=1.0, presence_penalty=0.5)
    request = await check_request(replace(REQUEST, sampling=said), TOKENIZER, RECOMMENDING, OFFERS)
    expected = SamplingParameters(temperature=1.0, top_p=0.9, top_k=40, presence_penalty=0.5)
    assert request.spec.sampling == expected
    assert request.spec.max_len == request.spec.prompt_len + 200


async def test_beams_are_those_of_the_model_as_it_is() -> None:
    """What it recommends is for samples: no temperature, no cuts and no penalty, and no error about any of them."""
    defaults = GenerationDefaults(temperature=0.2, top_k=5, top_p=0.5, min_p=0.1, repetition_penalty=1.3, max_tokens=9)
    searched = replace(REQUEST, beam_search=BeamSearch(2))
    request = await check_request(searched, TOKENIZER, replace(TARGET, defaults=defaults), OFFERS)
    assert request.spec.sampling == SamplingParameters()
    assert request.spec.max_len == request.spec.prompt_len + 9


@pytest.mark.parametrize("count", [0, 2])
async def test_beams_have_no_log_probabilities(count: int) -> None:
    """Not even those of their tokens alone, and nothing goes to a target before that is said."""
    searched = replace(REQUEST, beam_search=BeamSearch(2), logprob_count=count)
    with pytest.raises(InvalidRequest, match=f"logprob_count is {count}, but must be absent with beam_search"):
        await check(searched)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 200),
        ({"max_tokens": 300}, 300),
        ({"most_new_tokens": 150}, 150),
        ({"most_new_tokens": 500}, 200),
        ({"up_to_context": True}, 200),
        ({"up_to_context": True, "max_tokens": 250}, 250),
        ({"token_ids": (5,) * 1000}, 24),
    ],
)
async def test_the_models_own_length_is_a_default_and_no_limit(changes: dict[str, object], expected: int) -> None:
    """It gives way to what was said, to a key and to the context."""
    request = replace(GenerationRequest(token_ids=(5,) * 20), **changes)
    spec = (await check_request(request, TOKENIZER, RECOMMENDING, OFFERS)).spec
    assert spec.max_len - spec.prompt_len == expected


async def test_seeds_differ() -> None:
    """Two requests without a seed do not share one."""
    assert (await check(REQUEST)).spec.seed != (await check(REQUEST)).spec.seed


async def test_token_ids_are_taken_as_they_are() -> None:
    """A prompt of token ids is not touched."""
    assert (await check(GenerationRequest(token_ids=(7, 7, 4095)))).spec.token_ids == (7, 7, 4095)


async def test_the_default_length_shrinks_to_the_room() -> None:
    """Without max_tokens the output is what the context leaves."""
    request = await check(GenerationRequest(token_ids=(5,) * 1000))
    assert request.spec.max_len == 1024


async def test_an_answer_may_go_up_to_the_context() -> None:
    """Then more than fits is no error, but a prompt that leaves no room is."""
    request = GenerationRequest(token_ids=(5,) * 1000, up_to_context=True)
    for max_tokens, expected in ((None, 1024), (25, 1024), (24, 1024), (23, 1023)):
        assert (await check(replace(request, max_tokens=max_tokens))).spec.max_len == expected
    with pytest.raises(PromptTooLong, match="prompt has 1024 tokens"):
        await check(replace(request, token_ids=(5,) * 1024, max_tokens=25))


async def test_what_was_not_sent_is_cut_to_what_a_key_may_have() -> None:
    """Over all samples, of which each has its share; what was sent is left to the key's own check."""
    request = GenerationRequest(token_ids=(5,) * 20, most_tokens=100)
    for changes, expected in (
        ({}, 80),
        ({"sample_count": 3}, 26),
        ({"beam_search": BeamSearch(2, 1.0)}, 40),
        ({"sample_count": 2, "up_to_context": True, "max_tokens": 90}, 40),
        ({"most_tokens": 1000}, 128),
        ({"most_tokens": 20}, 1),
        ({"max_tokens": 90}, 90),
    ):
        checked = await check(replace(request, **changes))  # type: ignore[arg-type]
        assert checked.spec.max_len - checked.spec.prompt_len == expected, changes


async def test_it_is_known_whether_an_answer_may_fill_the_context() -> None:
    """Not by what was asked for, but by where the longest answer ends."""
    request = GenerationRequest(token_ids=(5,) * 1000, max_tokens=50, up_to_context=True)
    assert (await check(request)).fills_context
    assert not (await check(replace(request, max_tokens=23))).fills_context
    assert not (await check(replace(request, most_tokens=1010))).fills_context


async def test_too_long_names_all_three_numbers() -> None:
    """The error says how long prompt and output are, and what the context is."""
    with pytest.raises(PromptTooLong, match=r"prompt of 1000 tokens and max_tokens 25 .* context of 1024 tokens"):
        await check(GenerationRequest(token_ids=(5,) * 1000, max_tokens=25))


async def test_a_prompt_that_is_too_long_is_not_looked_into() -> None:
    """Its ids are not checked one by one, which would take the loop's time."""
    with pytest.raises(PromptTooLong):
        await check(GenerationRequest(token_ids=(99_999,) * 2000))


async def test_a_prompt_alone_too_long_is_told_of_nothing_that_nobody_wrote() -> None:
    """Without max_tokens the sentence speaks of the prompt and the context only."""
    for length in (1024, 2000):
        with pytest.raises(PromptTooLong, match=f"prompt has {length} tokens, .* context of 1024 tokens") as caught:
            await check(GenerationRequest(token_ids=(5,) * length))
        assert "max_tokens" not in caught.value.message
        assert caught.value.metadata == {"prompt_tokens": str(length), "context_len": "1024"}


async def test_the_cache_limits_a_request_where_it_is_smaller_than_the_context() -> None:
    """Both numbers and the cache's size are named, and the default length is what the cache leaves."""
    limits = replace(TARGET, kv_tokens=640)
    request = GenerationRequest(token_ids=(5,) * 600)
    with pytest.raises(PromptTooLong, match=r"600 tokens and max_tokens 41 .* the key-value cache of 640 tokens"):
        await check_request(replace(request, max_tokens=41), TOKENIZER, limits, OFFERS)
    for fitting in (request, replace(request, max_tokens=40)):
        assert (await check_request(fitting, TOKENIZER, limits, OFFERS)).spec.max_len == 640
    with pytest.raises(PromptTooLong, match=r"prompt has 640 tokens, .* key-value cache of 640 tokens"):
        await check_request(GenerationRequest(token_ids=(5,) * 640), TOKENIZER, limits, OFFERS)


async def test_a_long_text_is_encoded_to_the_same_ids() -> None:
    """Encoding off the loop changes nothing."""
    text = "a king and a queen " * 400
    with pytest.raises(PromptTooLong, match=f"prompt has {len(await TOKENIZER.encode(text))} tokens"):
        await check(GenerationRequest(text=text))


async def test_a_text_that_cannot_fit_is_not_encoded() -> None:
    """No token has more characters than the longest, and never are more than a million taken."""
    fitting = 1024 * TOKENIZER.longest_token
    with pytest.raises(PromptTooLong, match="tokens, but must leave room"):
        await check(GenerationRequest(text="a" * fitting))
    with pytest.raises(
        PromptTooLong, match=f"prompt has {fitting + 1} characters, but at most {fitting} are"
    ) as caught:
        await check(GenerationRequest(text="a" * (fitting + 1)))
    assert caught.value.metadata == {
        "prompt_chars": str(fitting + 1),
        "max_chars": str(fitting),
        "context_len": "1024",
    }
    large = replace(TARGET, context_len=10_000_000, kv_tokens=10_000_000)
    with pytest.raises(PromptTooLong, match="has 1000001 characters, but at most 1000000 are"):
        await check_request(GenerationRequest(text="a" * 1_000_001), TOKENIZER, large, OFFERS)
    with pytest.raises(
        InvalidRequest, match=f"prediction has {fitting + 1} characters, but must have at most {fitting}"
    ):
        await check(replace(REQUEST, prediction="a" * (fitting + 1)))


async def test_without_speculation_k_is_zero() -> None:
    """Disabled speculation wins over a draft count."""
    assert (await check(replace(REQUEST, speculation_enabled=False, draft_count=5))).draft_count == 0
    assert (await check(replace(REQUEST, draft_count=5))).draft_count == 5


async def test_ignore_eos_leaves_no_eos() -> None:
    """Under ignore_eos nothing ends the request as end of sequence."""
    request = await check(replace(REQUEST, sampling=SamplingParameters(ignore_eos=True)))
    assert request.spec.eos_token_ids == frozenset()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"text": None}, "prompt"),
        ({"token_ids": (1,)}, "prompt"),
        ({"text": ""}, "prompt"),
        ({"text": None, "token_ids": ()}, "prompt"),
        ({"text": None, "token_ids": (1, 4096)}, "token_ids.1"),
        ({"text": None, "token_ids": (-1,)}, "token_ids.0"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -3}, "max_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"stops": ("a",) * 65}, "stop"),
        ({"stops": ("fine", "")}, "stop.1"),
        ({"stops": ("x" * 257,)}, "stop.0"),
        ({"stop_token_ids": (1,) * 65}, "stop_token_ids"),
        ({"stop_token_ids": (4096,)}, "stop_token_ids.0"),
        ({"draft_count": 9}, "speculation.draft_count"),
        ({"draft_count": -1}, "speculation.draft_count"),
        ({"drafters": ("oracle",)}, "speculation.drafter"),
        ({"drafters": ("lookup", "oracle")}, "speculation.drafters"),
        ({"drafters": ("lookup", "auto")}, "speculation.drafters"),
        ({"drafters": ("model", "model")}, "speculation.drafters"),
        ({"drafters": ("lookup", "hosted")}, "speculation.drafters"),
        ({"drafters": tuple(map(str, range(9)))}, "speculation.drafters"),
        ({"drafters": ("lookup",), "shape": TreeShape()}, "speculation.shape"),
        ({"draft_count": 5, "shape": TreeShape(expansions=(2, 2))}, "speculation.shape.expansions"),
        ({"shape": TreeShape(expansions=(8, 8))}, "speculation.shape.expansions"),
        ({"prediction": "so", "speculation_enabled": False}, "prediction"),
        ({"prediction": "so", "drafters": ("model",)}, "prediction"),
        ({"prediction": (5,) * 1025}, "prediction"),
        ({"prediction": "so " * 1025}, "prediction"),
        ({"prediction": (5, 4096)}, "prediction.1"),
        ({"max_tokens": 4, "sampling": SamplingParameters(min_tokens=5)}, "sampling.min_tokens"),
        ({"sampling": SamplingParameters(logit_bias={4096: 1.0})}, "sampling.logit_bias key"),
    ],
)
async def test_bad_values_are_named(change: dict[str, object], field: str) -> None:
    """Every refusal names the field, the value and the limit."""
    with pytest.raises(InvalidRequest) as caught:
        await check(replace(REQUEST, **change))  # type: ignore[arg-type]
    assert caught.value.metadata["field"] == field
    assert caught.value.metadata["limit"]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"sampling": SamplingParameters(logit_bias={7: 1.0, 4096: 1.0})},
            "sampling.logit_bias key is 4096, but must be a token id between 0 and 4095",
        ),
        ({"stop_token_ids": (1, 4096)}, "stop_token_ids.1 is 4096, but must be a token id between 0 and 4095"),
        ({"stop_token_ids": (1,) * 65}, "stop_token_ids has 65 ids, but must have at most 64"),
        ({"stops": ("a",) * 65}, "stop has 65 strings, but must have at most 64"),
        ({"banned_words": ("a",) * 65}, "banned_words has 65 strings, but must have at most 64"),
        ({"banned_words": ("",)}, "banned_words.0 is '', but must be of 1 to 256 characters"),
        (
            {"banned_words": ("\u2603" * 100,)},
            "banned_words.0 is '" + "\u2603" * 76 + "..., but must be of at most 64 tokens",
        ),
        ({"sample_count": 0}, "sample_count is 0, but must be between 1 and 8"),
        ({"sample_count": 9}, "sample_count is 9, but must be between 1 and 8"),
        ({"logprob_count": 21}, "logprob_count is 21, but must be between 0 and 20"),
        ({"logprob_count": -1}, "logprob_count is -1, but must be between 0 and 20"),
        ({"echo": True}, "echo is True, but must be false without logprob_count"),
    ],
)
async def test_refusals_are_sentences(change: dict[str, object], sentence: str) -> None:
    """Field, value and limit, in words that read well."""
    with pytest.raises(InvalidRequest) as caught:
        await check(replace(REQUEST, **change))  # type: ignore[arg-type]
    assert caught.value.message == sentence


async def test_a_drafter_is_not_checked_while_nobody_knows_the_names() -> None:
    """While the draft service is away any name passes: the draft will refuse it, if it does not know it either."""
    away = Offers(None, {})
    request = await check_request(replace(REQUEST, drafters=("oracle",)), TOKENIZER, TARGET, away)
    assert request.drafters == ("oracle",)
    with pytest.raises(InvalidRequest, match="drafter is 'oracle', but must be one of lookup"):
        await check_request(replace(REQUEST, drafters=("oracle",)), TOKENIZER, TARGET, Offers({}, {}))


async def test_a_shape_is_for_whoever_makes_trees() -> None:
    """In the target's process too, named or not; one that makes chains there is refused it."""
    shaped = replace(REQUEST, shape=TreeShape(is_static=True))
    grows = Offers({}, {"hosted": frozenset(Rule), "eagle3": frozenset(Rule)}, own_trees=frozenset({"hosted"}))
    for drafters in ((), ("hosted",)):
        request = await check_request(replace(shaped, drafters=drafters), TOKENIZER, TARGET, grows)
        assert request.shape == shaped.shape
    for offers, drafters in ((grows, ("eagle3",)), (replace(grows, own_trees=frozenset()), ())):
        with pytest.raises(InvalidRequest, match="shape is 'present', but must be absent where nobody makes trees"):
            await check_request(replace(shaped, drafters=drafters), TOKENIZER, TARGET, offers)


BOTH = Offers(
    {"last": frozenset({Rule.MATCH}), "tree": frozenset(Rule)},
    {"last": frozenset({Rule.MATCH, Rule.RATIO}), "tree": frozenset(Rule)},
    own_trees=frozenset({"tree"}),
    remote_chains=frozenset({"last"}),
)


def test_a_name_at_two_places_is_two_drafters() -> None:
    """Each by its own rules and shapes; the name is listed once."""
    assert BOTH.names == ["lookup", "last", "tree"]
    assert BOTH.places("last", Rule.MATCH) == {Place.REMOTE, Place.HOSTED}
    assert BOTH.places("last", Rule.RATIO) == {Place.HOSTED}
    assert BOTH.places("last", Rule.BLOCK) == BOTH.places("last", Rule.MATCH, TreeShape()) == frozenset()
    assert BOTH.places("tree", Rule.MATCH, TreeShape()) == {Place.REMOTE, Place.HOSTED}
    assert replace(BOTH, own_trees=frozenset()).places("tree", Rule.MATCH, TreeShape()) == {Place.REMOTE}
    # While the draft service is away, what the target does not know may be its.
    away = replace(BOTH, remote=None)
    assert (away.places("last", Rule.MATCH), away.places("other", Rule.MATCH)) == ({Place.HOSTED}, {Place.REMOTE})


async def test_a_list_takes_the_draft_services_drafter_of_a_name_that_both_offer() -> None:
    """Under the rules that it serves there; alone the name has those of both."""
    listed = replace(REQUEST, drafters=("last", "lookup"))
    assert (await check_request(listed, TOKENIZER, TARGET, BOTH)).drafters == ("last", "lookup")
    ratio = Acceptance(rule=Rule.RATIO)
    with pytest.raises(InvalidRequest, match="drafters is 'last', but must be without those in the target's process"):
        await check_request(replace(listed, acceptance=ratio), TOKENIZER, TARGET, BOTH)
    alone = replace(REQUEST, drafters=("last",), acceptance=ratio)
    assert (await check_request(alone, TOKENIZER, TARGET, BOTH)).drafters == ("last",)


async def test_auto_is_the_same_as_no_name() -> None:
    """The gateway chooses, in both."""
    assert (await check(replace(REQUEST, drafters=("auto",)))).drafters == (await check(REQUEST)).drafters == ()


async def test_a_fixed_shape_is_the_number_of_guesses() -> None:
    """Unless one is given, and unless nothing is to be guessed; any other shape leaves it to the gateway."""
    fixed = replace(REQUEST, shape=TreeShape(expansions=(3, 1)))
    assert (await check(fixed)).draft_count == 6
    assert (await check(replace(fixed, draft_count=7))).draft_count == 7
    assert (await check(replace(fixed, speculation_enabled=False))).draft_count == 0
    assert (await check(replace(REQUEST, shape=TreeShape(max_depth=3)))).draft_count is None


async def test_a_prediction_becomes_tokens() -> None:
    """Without a mark of the beginning, because it continues the prompt."""
    request = await check(replace(REQUEST, prediction=" upon a time"))
    assert TOKENIZER.decode(list(request.prediction)) == " upon a time"
    assert (await check(replace(REQUEST, prediction=(7, 8)))).prediction == (7, 8)
    with pytest.raises(InvalidRequest, match="prediction is 'present', but must be absent unless lookup"):
        await check_request(replace(REQUEST, prediction="so"), TOKENIZER, TARGET, replace(OFFERS, looks=False))


async def test_a_drafter_that_cannot_serve_the_rule_is_refused() -> None:
    """The sentence names those that can."""
    ratio = replace(REQUEST, drafters=("coupled",), acceptance=Acceptance(rule=Rule.RATIO))
    fitting = "one that serves the rule ratio: lookup, model, hosted"
    with pytest.raises(InvalidRequest, match=f"drafter is 'coupled', but must be {fitting}"):
        await check(ratio)
    assert (await check(replace(ratio, drafters=("model",)))).spec.acceptance.rule is Rule.RATIO


async def test_banned_words_become_their_token_sequences() -> None:
    """As they begin a text and as they go on in one; words that share a sequence share it once."""
    request = await check(replace(REQUEST, banned_words=("wolf", "wolf", "the queen")))
    alone, behind = await TOKENIZER.encode("wolf", special=False), await TOKENIZER.encode(" wolf", special=False)
    assert alone != behind
    assert request.spec.banned[:2] == (alone, behind)
    assert len(request.spec.banned) == 4


async def test_samples_differ_in_their_seeds_only() -> None:
    """The first keeps the request's seed and reads the prompt's log-probabilities; the others draw with their own."""
    request = await check(replace(REQUEST, sample_count=8, seed=5, logprob_count=2, echo=True))
    samples = [request.sample(index) for index in range(request.sample_count)]
    assert samples[0].spec == request.spec
    assert len({sample.spec.seed for sample in samples}) == 8
    assert [sample.spec.prompt_logprobs for sample in samples] == [True] + [False] * 7
    assert {sample.spec.token_ids for sample in samples} == {request.spec.token_ids}


async def test_an_echo_that_no_message_holds_is_refused() -> None:
    """Up to the largest prompt that a message holds, and not a token further."""
    limits = replace(TARGET, context_len=100_000, kv_tokens=100_000)
    request = GenerationRequest(token_ids=(5,) * 9_279, logprob_count=20, echo=True)
    assert (await check_request(request, TOKENIZER, limits, OFFERS)).spec.prompt_logprobs
    with pytest.raises(InvalidRequest, match=r"echo is True, but must be false for a prompt of 9280 .* at most 9279"):
        await check_request(replace(request, token_ids=(5,) * 9_280), TOKENIZER, limits, OFFERS)


async def test_a_stop_that_names_a_special_token_is_a_stop_token() -> None:
    """Beside those that are named by id; with text around the name it is looked for in the text and the names."""
    stops = ("king", "<|endoftext|>", "king<|endoftext|>", "<|endoftext")
    checked = await check(replace(REQUEST, stops=stops, stop_token_ids=(7,)))
    assert checked.spec.stop_token_ids == {0, 7}
    assert checked.stops == stops
    assert checked.naming_stops == set(stops[1:3])


async def test_a_grammar_may_end_where_a_stop_names_a_special_token() -> None:
    """With a model that has no end of its own."""
    target = replace(TARGET, eos_token_ids=frozenset(), grammar_engine=ENGINE)
    request = replace(REQUEST, constraint=Constraint(ConstraintKind.REGEX, "[a-z]+", "constraint.regex"))
    with pytest.raises(InvalidRequest, match="the model has no end of its own"):
        await check_request(request, TOKENIZER, target, OFFERS)
    checked = await check_request(replace(request, stops=("<|endoftext|>",)), TOKENIZER, target, OFFERS)
    assert checked.spec.stop_token_ids == {0}
