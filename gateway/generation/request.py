"""Requests as their clients wrote them, and as they are once checked; the drafters that they may name."""

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from gateway.rounds.round import LOOKUP, Place
from gateway.tools.call_grammar import CallRules
from gateway.tools.reader import Reading
from outrider.beams import BeamSearch
from outrider.constraint import Constraint
from outrider.grammar import Grammar
from outrider.parameters import Acceptance, Rule, SamplingParameters, SessionSpec
from outrider.token_tree import TreeShape

MAX_STRING_LEN = 256
MAX_DRAFTERS = 8
MAX_TEXT_CHARS = 1_000_000


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Fields of a client's request; None where it wrote nothing."""

    text: str | None = None
    token_ids: Sequence[int] | None = None
    """Token ids, whose length is checked first, because to read a million ids would be felt by other requests."""
    max_tokens: int | None = None
    sampling: SamplingParameters = field(default_factory=SamplingParameters)
    seed: int | None = None
    stops: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    speculation_enabled: bool = True
    draft_count: int | None = None
    acceptance: Acceptance = field(default_factory=Acceptance)
    drafters: tuple[str, ...] = ()
    """Drafters that are to guess together; none leaves the choice to the gateway."""
    shape: TreeShape | None = None
    prediction: str | Sequence[int] | None = None
    """Expected answer, as text or token ids."""
    logprob_count: int | None = None
    sample_count: int | None = None
    banned_words: tuple[str, ...] = ()
    echo: bool = False
    scores: bool = False
    """Whether the prompt alone is wanted; the token that is drawn after it is not shown."""
    return_rounds: bool = False
    cache_salt: str = ""
    unrecorded: bool = False
    beam_search: BeamSearch | None = None
    add_special_tokens: bool = True
    """Whether text gets the tokenizer's special tokens; a rendered chat template has them already."""
    reading: Reading | None = None
    """How calls of tools and reasoning are found in the answer; None takes all of it for text."""
    constraint: Constraint | None = None
    """Form that the answer must have where it is no call."""
    rules: CallRules = field(default_factory=CallRules)
    """Rules about the calls of the answer, for those who read them."""
    up_to_context: bool = False
    """Whether max_tokens is cut to what is left of the context and of the key, and is all of that when it is None."""
    tenant: str = ""
    """Name of the API key that the request came with. Tenants share nothing that is remembered."""
    ignored: tuple[str, ...] = ()
    """Fields of chat's messages that the prompt says otherwise, or not at all, for the surface to name."""
    most_tokens: int | None = None
    """Most tokens of prompt and answers together with that key, to which max_tokens is cut unless it was sent."""
    most_new_tokens: int | None = None
    """Most tokens of an answer with that key, to which max_tokens is cut unless it was sent."""


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A request that passed all checks. draft_count None lets the gateway choose, and 0 never speculates. Without
    drafters the gateway chooses among all that there are.
    """

    spec: SessionSpec
    stops: tuple[str, ...]
    draft_count: int | None
    drafters: tuple[str, ...] = ()
    shape: TreeShape | None = None
    prediction: tuple[int, ...] = ()
    sample_count: int = 1
    sample_index: int = 0
    beam_search: BeamSearch | None = None
    """Beam search that makes all samples; None for none."""
    reading: Reading | None = None
    scores: bool = False
    """Whether the token after the prompt is not shown."""
    fills_context: bool = False
    """Whether the longest answer ends where the context does."""
    naming_stops: frozenset[str] = frozenset()
    """Stop strings that have the name of a token in them that clients do not read."""
    constraint: Constraint | None = None
    """Constraint that the grammar was made of, calls and reasoning included."""
    grammar: Grammar | None = field(default=None, repr=False, compare=False)
    """The spec's grammar, compiled, with what is known of it; of a sample its own."""

    @property
    def num_runs(self) -> int:
        """Number of times that it is decoded: once for each sample, or for all beams."""
        return 1 if self.beam_search else self.sample_count

    @property
    def ignored_keywords(self) -> tuple[str, ...]:
        """Keywords of schemas that are not strict that are not enforced."""
        if self.grammar is None or self.constraint is None:
            return ()
        return tuple(sorted({*self.grammar.ignored_keywords, *self.constraint.unkept}))

    @property
    def fixes_guesses(self) -> bool:
        """Whether it says itself who guesses and how much, so that nothing of other requests has a part in that."""
        is_shaped = self.shape is None or bool(self.shape.expansions)
        return self.draft_count is not None and bool(self.drafters) and LOOKUP.name not in self.drafters and is_shaped

    def sample(self, index: int) -> Self:
        """Request for one of its samples, with its own seed. Only the first reads the prompt's log-probabilities."""
        prompt_logprobs = self.spec.prompt_logprobs and index == 0
        spec = replace(self.spec, seed=sample_seed(self.spec.seed, index), prompt_logprobs=prompt_logprobs)
        return replace(self, spec=spec, sample_index=index, grammar=self.grammar and self.grammar.session())


@dataclass(frozen=True, slots=True)
class Offers:
    """Drafters that requests may name, each with the rules that it can serve. One name may be at two places.

    `remote` are those of draft services, None while they are unknown because the service is away; `own` those in the
    target's process, of which own_trees make trees; `looks` says whether the gateway looks guesses up. Remote ones make
    trees but for remote_chains.
    """

    remote: Mapping[str, frozenset[Rule]] | None
    own: Mapping[str, frozenset[Rule]]
    looks: bool = True
    own_trees: frozenset[str] = frozenset()
    remote_chains: frozenset[str] = frozenset()

    @property
    def names(self) -> list[str]:
        """Names of all drafters, without repetition."""
        return list(dict.fromkeys((*([LOOKUP.name] if self.looks else []), *(self.remote or {}), *self.own)))

    def places(self, name: str, rule: Rule, shape: TreeShape | None = None) -> frozenset[Place]:
        """Places where a name's drafter serves a rule, and makes a shape where one is given.

        While the remote drafters are unknown, a name that the target does not know is one of them.
        """
        if name == LOOKUP.name:
            return frozenset({Place.LOOKUP} if self.looks and shape is None else ())
        remote = {name: frozenset(Rule)} if self.remote is None and name not in self.own else self.remote or {}
        is_remote = rule in remote.get(name, ()) and (shape is None or name not in self.remote_chains)
        is_hosted = rule in self.own.get(name, ()) and (shape is None or name in self.own_trees)
        return frozenset((*([Place.REMOTE] if is_remote else []), *([Place.HOSTED] if is_hosted else [])))


def new_seed() -> int:
    """A random one of 53 bits, so that a client in JavaScript, where numbers are floats, can send it back."""
    return secrets.randbits(53)


def sample_seed(seed: int, index: int) -> int:
    """The seed of a sample; the first has the request's own, the others one of 53 bits, which JavaScript can repeat.

    Far apart for neighbouring seeds and indices, so that no sample of one request is a sample of another.
    """
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little") >> 11
