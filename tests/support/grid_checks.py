"""What must hold of every answer, whatever its parameters. Each check fails by itself, and knows no other request."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from tokenizers import Tokenizer

from outrider.v1 import generation_service_pb2 as pb
from outrider.v1 import types_pb2
from support.grid import EOS, STORY, is_plain
from support.stack import MODELS, Answer, RunningStack, request_of

Fields = Mapping[str, Any]


@dataclass(frozen=True)
class Samples:
    """The answers to one request, by the index of the sample."""

    fields: Fields
    answers: tuple[Answer, ...]

    @property
    def token_ids(self) -> list[tuple[int, ...]]:
        """What was said."""
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
    rounds: dict[int, list[pb.Round]] = {}
    answers: dict[int, Answer] = {}
    async for response in call:
        event = response.round if response.HasField("round") else response.completion
        assert event.sample_index not in answers
        if isinstance(event, pb.Round):
            rounds.setdefault(event.sample_index, []).append(event)
        else:
            answers[event.sample_index] = Answer(tuple(rounds[event.sample_index]), event)
    assert sorted(answers) == list(range(fields.get("sample_count", 1)))
    return Samples(fields, tuple(answers[index] for index in sorted(answers)))


def tokens_of(answer: Answer) -> list[pb.GeneratedToken]:
    """The output's tokens with all that was told about them."""
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
    assert not any(stop in answer.text for stop in fields.get("stop", ()))
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
    """As far as two answers say the same, their log-probabilities are equal bit by bit."""
    for mine, theirs in zip(one.answers, other.answers, strict=False):
        for token, same in zip(tokens_of(mine), tokens_of(theirs), strict=False):
            if token.token_id != same.token_id:
                # This one still stands behind the same tokens, so the alternatives are the same.
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
