"""What a request can be asked for with, in rows that hold every pair of values, and what holds of every answer.

The rows come from greedy all-pairs, without any randomness. Each check fails by itself, and knows no other request.
"""

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product
from typing import Any

from tokenizers import Tokenizer

from outrider.v1 import generation_service_pb2 as generation_pb
from outrider.v1 import types_pb2
from outrider.v1 import types_pb2 as pb
from support.stack import MODELS, Answer, RunningStack, request_of

# A parameter by its number, and the number of its value.
Choice = tuple[int, int]
Pair = tuple[Choice, Choice]
Allowed = Callable[[str, Any, str, Any], bool]


def everything_goes(*_: Any) -> bool:
    """No pair of values is forbidden."""
    return True


def all_pairs(parameters: Mapping[str, Sequence[Any]], allowed: Allowed = everything_goes) -> list[dict[str, Any]]:
    """Rows with a value for each parameter. `allowed` gets two parameters in their order, each with a value.

    Raises ValueError when a row cannot be completed, because every value is forbidden beside those in it.
    """
    names = list(parameters)
    sizes = [len(parameters[name]) for name in names]

    def fits(first: Choice, second: Choice) -> bool:
        (one, this), (other, that) = sorted((first, second))
        return allowed(names[one], parameters[names[one]][this], names[other], parameters[names[other]][that])

    # A mapping, because its order is that in which they were put in, which a set's is not.
    missing = {pair: None for pair in _pairs(sizes) if fits(*pair)}
    rows = []
    while missing:
        row = _row(sizes, missing, fits)
        for pair in combinations(row, 2):
            missing.pop(pair, None)
        rows.append({names[number]: parameters[names[number]][value] for number, value in row})
    return rows


def missing_pairs(parameters: Mapping[str, Sequence[Any]], rows: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Pairs of values that no row has."""
    return [
        (one, this, other, that)
        for one, other in combinations(parameters, 2)
        for this, that in product(parameters[one], parameters[other])
        if not any(row[one] == this and row[other] == that for row in rows)
    ]


def _pairs(sizes: Sequence[int]) -> Iterator[Pair]:
    for one, other in combinations(range(len(sizes)), 2):
        for this in range(sizes[one]):
            yield from (((one, this), (other, that)) for that in range(sizes[other]))


def _row(sizes: Sequence[int], missing: Mapping[Pair, None], fits: Callable[[Choice, Choice], bool]) -> list[Choice]:
    """A row that begins with the first missing pair; every further value makes up as many of them as it can."""
    row = list(next(iter(missing)))

    def gain(choice: Choice) -> int:
        return sum(tuple(sorted((choice, each))) in missing for each in row)

    for number in sorted(set(range(len(sizes))) - {taken for taken, _ in row}):
        choices = [(number, value) for value in range(sizes[number])]
        fitting = [choice for choice in choices if all(fits(choice, each) for each in row)]
        if not fitting:
            raise ValueError(f"no value of parameter {number} fits into {row}")
        row.append(max(fitting, key=gain))
    return sorted(row)


MATCH, RATIO, BLOCK = pb.ACCEPTANCE_RULE_MATCH, pb.ACCEPTANCE_RULE_RATIO, pb.ACCEPTANCE_RULE_BLOCK
LENIENT, TYPICAL = pb.ACCEPTANCE_RULE_LENIENT, pb.ACCEPTANCE_RULE_TYPICAL
EOS = 0
STORY = "Once upon a time there was a king who had"
STORY_TOKENS = [2256, 677, 259, 513, 443, 307, 259, 540, 390, 337]
BANNED_WORDS = ["the", "a", "daughters", "woodcutter"]
STOP = " and"
Row = Mapping[str, Mapping[str, Any]]

RULES = {"match": MATCH, "ratio": RATIO, "block": BLOCK, "lenient": LENIENT, "typical": TYPICAL}
# A factor of 1 makes `lenient` the same as `ratio`.
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "lenient": [{}, {"acceptance": pb.AcceptanceSettings(lenience=1.0)}],
    "typical": [{}, {"acceptance": pb.AcceptanceSettings(typical_epsilon=0.5, typical_delta=0.9)}],
}
PARAMETERS: dict[str, list[dict[str, Any]]] = {
    "speculation": [{"draft_count": 4}, {"draft_count": 1}, {"draft_count": 0}, {}, {"enabled": False}],
    "drafter": [{}, {"drafter": "model"}, {"drafter": "coupled"}, {"drafter": "sampled"}],
    "temperature": [{}, {"temperature": 0.0}, {"temperature": 0.7}, {"temperature": 1.4}],
    "top_k": [{}, {"top_k": 20}, {"top_k": 1}],
    "top_p": [{}, {"top_p": 0.9}],
    "min_p": [{}, {"min_p": 0.05}],
    "repetition_penalty": [{}, {"repetition_penalty": 1.3}],
    "presence_penalty": [{}, {"presence_penalty": 0.8}, {"presence_penalty": -0.8}],
    "frequency_penalty": [{}, {"frequency_penalty": 0.5}, {"frequency_penalty": -0.5}],
    "logit_bias": [{}, {"logit_bias": {12: 6.0, 259: -6.0}}, {"logit_bias": {EOS: 9.0}}],
    "length": [
        {"max_tokens": 16},
        {"max_tokens": 24, "min_tokens": 10},
        {"max_tokens": 16, "min_tokens": 16},
        {"max_tokens": 1},
    ],
    "ignore_eos": [{}, {"ignore_eos": True}],
    "stop_token_ids": [{}, {"stop_token_ids": [12, 14]}],
    "stop": [{}, {"stop": [STOP]}],
    "banned_words": [{}, {"banned_words": BANNED_WORDS}],
    "logprobs": [{}, {"logprob_count": 0}, {"logprob_count": 3}, {"logprob_count": 20, "echo": True}],
    "samples": [{}, {"sample_count": 2}, {"sample_count": 5}],
    "seed": [{"seed": 11}, {"seed": -(2**63)}],
    "prompt": [{"text": STORY}, {"token_ids": STORY_TOKENS}],
}


def parameters_of(rule: str) -> dict[str, list[dict[str, Any]]]:
    """All parameters of requests under a rule; only those drafters that can serve it."""
    drafters = [
        each for each in PARAMETERS["drafter"] if each != {"drafter": "coupled"} or rule in {"match", "typical"}
    ]
    only = {"rule": [{"rule": RULES[rule]}], "acceptance": SETTINGS.get(rule, [{}])}
    return {**only, **PARAMETERS, "drafter": drafters}


def rows(rule: str) -> list[Row]:
    """Rows of a rule in which every pair of values occurs."""
    return list(all_pairs(parameters_of(rule)))


def fields_of(row: Row) -> dict[str, Any]:
    """The fields of the request that a row stands for."""
    return {name: value for fields in row.values() for name, value in fields.items()}


def plain_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the same request decoded plainly under `match`."""
    speculative = {"rule", "acceptance", "draft_count", "enabled", "drafter", "drafters", "shape", "prediction_text"}
    return {name: value for name, value in fields.items() if name not in speculative} | {"draft_count": 0}


def is_plain(fields: Mapping[str, Any]) -> bool:
    """Whether the request asks for no speculation."""
    return fields.get("draft_count") == 0 or not fields.get("enabled", True)


def is_greedy(fields: Mapping[str, Any]) -> bool:
    """Whether one token alone can be drawn in every place."""
    return fields.get("temperature") == 0.0 or fields.get("top_k") == 1


Fields = Mapping[str, Any]


@dataclass(frozen=True)
class Samples:
    """The answers to one request, by the index of the sample."""

    fields: Fields
    answers: tuple[Answer, ...]

    @property
    def token_ids(self) -> list[tuple[int, ...]]:
        """Token ids of all answers."""
        return [answer.token_ids for answer in self.answers]

    @property
    def logprobs(self) -> list[list[types_pb2.TokenLogprob]]:
        """Log-probabilities of all tokens, messages that compare bit by bit."""
        return [[token.logprob for token in tokens_of(answer)] for answer in self.answers]

    @property
    def draft_counts(self) -> list[list[tuple[int, int]]]:
        """Where each round began and how many tokens were drafted: all that a timing can change."""
        return [[(each.facts.base_len, each.facts.draft_count) for each in answer.rounds] for answer in self.answers]


async def ask(stack: RunningStack, fields: Fields) -> Samples:
    """Runs a request to its end; each sample's completion is the last of its messages.

    Each call has its own salt: what is compared with another call's answer must not be served from its cached keys.
    """
    call = stack.call(request_of(**{"cache_salt": secrets.token_hex(), **fields}))
    rounds: dict[int, list[generation_pb.Round]] = {}
    answers: dict[int, Answer] = {}
    async for response in call:
        event = response.round if response.HasField("round") else response.completion
        assert event.sample_index not in answers
        if isinstance(event, generation_pb.Round):
            rounds.setdefault(event.sample_index, []).append(event)
        else:
            answers[event.sample_index] = Answer(tuple(rounds[event.sample_index]), event)
    assert sorted(answers) == list(range(fields.get("sample_count", 1)))
    return Samples(fields, tuple(answers[index] for index in sorted(answers)))


def tokens_of(answer: Answer) -> list[generation_pb.GeneratedToken]:
    """The output's tokens with all that was reported about them."""
    return [token for each in answer.rounds for token in each.tokens]


def check_samples(samples: Samples) -> None:
    """Everything that a request's own fields say about its answers."""
    seeds = [answer.completion.seed for answer in samples.answers]
    assert seeds[0] == samples.fields["seed"]
    assert len(set(seeds)) == len(seeds)
    for index, answer in enumerate(samples.answers):
        check_end(samples.fields, answer)
        check_words(samples.fields, answer)
        check_figures(samples.fields, answer)
        check_logprobs(samples.fields, answer, wants_echo=samples.fields.get("echo", False) and index == 0)


def check_end(fields: Fields, answer: Answer) -> None:
    """An answer ends where a token, a text or the limit says so, not later and not sooner."""
    ends = {EOS: types_pb2.FINISH_REASON_EOS} if not fields.get("ignore_eos") else {}
    ends |= dict.fromkeys(fields.get("stop_token_ids", ()), types_pb2.FINISH_REASON_STOP_TOKEN)
    token_ids, reason = answer.token_ids, answer.completion.finish_reason
    assert not ends.keys() & set(token_ids[:-1])
    assert not ends.keys() & set(token_ids[: fields.get("min_tokens", 0)])
    assert 1 <= len(token_ids) <= fields["max_tokens"]
    # What is complete within the first tokens that may not end an answer is text.
    held = len(decoded(token_ids[: fields["min_tokens"]])) if fields.get("min_tokens") else 0
    assert not any(stop in answer.text[max(held - len(stop) + 1, 0) :] for stop in fields.get("stop", ()))
    if reason == types_pb2.FINISH_REASON_STOP_STRING:
        assert any(stop in decoded(token_ids) for stop in fields["stop"])
    elif token_ids[-1] in ends:
        assert reason == ends[token_ids[-1]]
    else:
        assert (reason, len(token_ids)) == (types_pb2.FINISH_REASON_LENGTH, fields["max_tokens"])


def check_words(fields: Fields, answer: Answer) -> None:
    """No banned word is in the tokens, as it is usually spelled in them."""
    for sequence in banned_sequences(tuple(fields.get("banned_words", ()))):
        assert not contains(answer.token_ids, sequence), sequence


def check_figures(fields: Fields, answer: Answer) -> None:
    """Counts agree with each other and with what was asked for, and the reply names the rule that decided."""
    told, completion = answer.completion.speculation, answer.completion
    facts = [each.facts for each in answer.rounds]
    assert completion.usage.completion_tokens == len(answer.token_ids)
    assert completion.rule == fields.get("rule", types_pb2.ACCEPTANCE_RULE_MATCH)
    assert completion.HasField("acceptance") == (
        completion.rule in {types_pb2.ACCEPTANCE_RULE_LENIENT, types_pb2.ACCEPTANCE_RULE_TYPICAL}
    )
    assert told.draft_tokens == sum(each.draft_count for each in facts)
    assert told.accepted_tokens == sum(each.accepted_count for each in facts)
    assert all(0 <= each.accepted_count <= each.evaluated_count <= each.draft_count for each in facts)
    assert all(each.draft_count <= fields.get("draft_count", each.draft_count) for each in facts)
    assert told.fallback_rounds == 0
    assert told.draft_tokens == 0 or not is_plain(fields)


def check_logprobs(fields: Fields, answer: Answer, *, wants_echo: bool) -> None:
    """They are there when asked for, in falling order, and the token's own is among them if it is as probable."""
    count = fields.get("logprob_count")
    tokens = tokens_of(answer)
    assert all(token.HasField("logprob") == (count is not None) for token in tokens)
    prompt = [token for each in answer.rounds for token in each.prompt_tokens]
    assert len(prompt) == (answer.completion.usage.prompt_tokens if wants_echo else 0)
    assert [token.HasField("logprob") for token in prompt] == [place > 0 for place in range(len(prompt))]
    assert list(answer.rounds[0].prompt_tokens) == prompt
    assert "".join(token.text for token in prompt) == (STORY if wants_echo else "")
    for token in [*tokens, *prompt[1:]] if count is not None else ():
        top = list(token.logprob.top_logprobs)
        assert len(set(token.logprob.top_token_ids)) == len(top) == count
        assert top == sorted(top, reverse=True)
        assert all(-1e4 < value <= 0 for value in [token.logprob.logprob, *top])
        told = dict(zip(token.logprob.top_token_ids, top, strict=True))
        if count:
            assert told.get(token.token_id, min(token.logprob.logprob, top[-1])) == token.logprob.logprob


def check_same_where_equal(one: Samples, other: Samples) -> None:
    """Asserts that log-probabilities are equal bit by bit as far as two answers say the same."""
    for mine, theirs in zip(one.answers, other.answers, strict=False):
        for token, same in zip(tokens_of(mine), tokens_of(theirs), strict=False):
            if token.token_id != same.token_id:
                # This one still stands after the same tokens, so the alternatives are the same.
                assert list(token.logprob.top_logprobs) == list(same.logprob.top_logprobs)
                break
            assert token.logprob == same.logprob


def contains(token_ids: Sequence[int], sequence: Sequence[int]) -> bool:
    """Whether a sequence occurs."""
    length = len(sequence)
    return any(tuple(token_ids[start : start + length]) == tuple(sequence) for start in range(len(token_ids)))


@cache
def tokenizer() -> Tokenizer:
    """The pair's, read without the gateway's help."""
    return Tokenizer.from_file(str(MODELS / "target" / "tokenizer.json"))


def decoded(token_ids: Sequence[int]) -> str:
    """The text of tokens."""
    text: str = tokenizer().decode(list(token_ids), skip_special_tokens=False)
    return text


@cache
def banned_sequences(words: tuple[str, ...]) -> list[list[int]]:
    """How words are usually spelled, at the beginning of a text and within one."""
    texts = [text for word in words for text in (word, f" {word}")]
    return [tokenizer().encode(text, add_special_tokens=False).ids for text in texts]
