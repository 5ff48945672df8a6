"""Requests with one fault each, by the field that is at fault: out of range, NaN, infinite, huge, or of the wrong kind.

Each fault says what a refusal of it must name. Knows no gateway.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from google.protobuf.descriptor import Descriptor
from hypothesis import strategies as st

from outrider.parameters import SETTINGS, Rule
from outrider.rpc.messages.rules import RULES
from outrider.v1 import generation_service_pb2 as pb
from outrider.v1 import types_pb2

INT32 = (-(2**31), 2**31 - 1)
MAX_TOKENS, VOCABULARY_SIZE, MAX_DRAFT_COUNT, CONTEXT_LEN = 8, 4096, 64, 4096
# Of a draft service.
DRAFTERS = ("model", "coupled", "sampled")
LONG = "x" * 257
# Few characters and many tokens.
RARE = "\U0001f9ff\U00013000" * 60
Faults = st.SearchStrategy["Fault"]


@dataclass(frozen=True)
class Fault:
    """What is wrong, as the refusal names it, and how it gets into a good request."""

    field: str
    value: object
    put: Callable[[pb.GenerateRequest], object]

    @property
    def request(self) -> pb.GenerateRequest:
        """The good request with the fault."""
        request = good_request()
        self.put(request)
        return request

    def __repr__(self) -> str:
        return f"Fault({self.field}, {self.value!r:.60})"


def good_request() -> pb.GenerateRequest:
    """A request that nothing is wrong with, short and with speculation."""
    sampling = types_pb2.SamplingParameters(temperature=0.7)
    speculation = pb.SpeculationSettings(draft_count=2)
    return pb.GenerateRequest(text="Once", max_tokens=MAX_TOKENS, seed=1, sampling=sampling, speculation=speculation)


def integers(least: int, most: int = INT32[1]) -> st.SearchStrategy[int]:
    """Integers of 32 bits outside [least, most], the nearest and the farthest among them."""
    ranges = [(low, high) for low, high in ((INT32[0], least - 1), (most + 1, INT32[1])) if low <= high]
    return st.one_of([st.sampled_from(each) | st.integers(*each) for each in ranges])


def numbers(fits: Callable[[float], bool]) -> st.SearchStrategy[float]:
    """Numbers that do not fit, infinities and NaN, and some that fit by a hair's breadth almost."""
    edges = [limit + step for limit in (0.0, 1.0, -2.0, 2.0, 100.0, -100.0) for step in (-1e-9, 0.0, 1e-9)]
    return st.one_of(st.sampled_from([math.nan, math.inf, -math.inf, -0.0, *edges]), st.floats()).filter(
        lambda value: not fits(value)
    )


def set_in(path: str, values: st.SearchStrategy[Any]) -> Faults:
    """Faults of a single value at a path within the request."""
    *way, name = path.split(".")

    def fault(value: object) -> Fault:
        def put(request: Any) -> None:
            for part in way:
                request = getattr(request, part)
            setattr(request, name, value)

        return Fault(path, value, put)

    return values.map(fault)


def listed(path: str, values: st.SearchStrategy[Any], good: Any) -> Faults:
    """Faults of one entry of a list, at any place among good ones."""

    def fault(place: int, value: object) -> Fault:
        entries = [*[good] * place, value, good]
        return Fault(f"{path}.{place}", value, lambda request: attrgetter(path)(request).extend(entries))

    return st.builds(fault, st.integers(0, 3), values)


def too_many(path: str, most: int, good: Any) -> Faults:
    """Lists that are too long."""
    counts = st.sampled_from((most + 1, 2 * most, 5000))
    return counts.map(
        lambda count: Fault(path, count, lambda request: attrgetter(path)(request).extend([good] * count))
    )


def biased(token_id: int, bias: float) -> Fault:
    """A bias of a token, one of them at fault."""
    is_key = not 0 <= token_id < VOCABULARY_SIZE
    field = "sampling.logit_bias" + (" key" if is_key else f".{token_id}")
    return Fault(field, token_id if is_key else bias, lambda request: _bias(request, {token_id: bias}))


def _bias(request: pb.GenerateRequest, biases: dict[int, float]) -> None:
    for token_id, bias in biases.items():
        request.sampling.logit_bias[token_id] = bias


def many_biases(count: int) -> Fault:
    """Too many of them."""
    return Fault("sampling.logit_bias", count, lambda request: _bias(request, dict.fromkeys(range(count), 1.0)))


def out_of_range(name: str, value: float) -> Fault:
    """A setting out of range, under its own rule."""
    rule = next(rule for rule, names in SETTINGS.items() if name in names)
    return setting(rule, name, value)


def setting(rule: Rule, name: str, value: float) -> Fault:
    """A setting under a rule."""

    def put(request: pb.GenerateRequest) -> None:
        request.speculation.rule = RULES[rule]
        setattr(request.speculation.acceptance, name, value)

    return Fault(f"speculation.acceptance.{name}", value, put)


def settings_of(name: str) -> Faults:
    """Values out of range, and good values under every rule that has no such setting."""
    others = [rule for rule in Rule if name not in SETTINGS.get(rule, ())]
    outside = numbers(lambda value: 0 < value <= 1)
    misplaced = st.builds(setting, st.sampled_from(others), st.just(name), st.sampled_from((0.5, 1.0)) | outside)
    return st.builds(out_of_range, st.just(name), outside) | misplaced


def drafted(rule: Rule, drafter: str) -> Fault:
    """A drafter that there is not, or that cannot serve the rule."""

    def put(request: pb.GenerateRequest) -> None:
        request.speculation.rule = RULES[rule]
        request.speculation.drafter = drafter

    return Fault("speculation.drafter", drafter, put)


def drafters() -> Faults:
    """Names of nothing, and `coupled` where a draft must draw by itself."""
    unknown = st.text(min_size=1, max_size=300).filter(lambda name: name not in {*DRAFTERS, "lookup", "auto"})
    alone = [rule for rule in Rule if rule.needs_distributions]
    return st.builds(drafted, st.sampled_from(Rule), unknown) | st.builds(
        drafted, st.sampled_from(alone), st.just("coupled")
    )


def together(names: list[str], value: object, drafter: str = "") -> Fault:
    """Several drafters that cannot guess together, and perhaps one beside them."""

    def put(request: pb.GenerateRequest) -> None:
        request.speculation.drafters.extend(names)
        request.speculation.drafter = drafter

    return Fault("speculation.drafters", value, put)


def teams() -> Faults:
    """Names of nothing, repeated ones, too many, and some beside a single name."""
    unknown = st.text(min_size=0, max_size=300).filter(lambda name: name not in {*DRAFTERS, "lookup"})
    repeated = st.sampled_from(DRAFTERS).map(lambda name: together([name, "lookup", name], [name, "lookup", name]))
    many = st.integers(9, 5000).map(lambda count: together([str(number) for number in range(count)], count))
    beside = st.sampled_from(DRAFTERS).map(lambda name: together(["lookup", "model"], ["lookup", "model"], name))
    return st.builds(lambda name: together(["lookup", name], name), unknown) | repeated | many | beside


def grown(*counts: int) -> Fault:
    """A tree of more rows than the good request asks for."""
    num_rows = sum(math.prod(counts[:depth]) for depth in range(1, len(counts) + 1))
    value = f"{list(counts)}, which are {num_rows} rows"
    path = "speculation.shape.expansions"
    return Fault(path, value, lambda request: request.speculation.shape.expansions.extend(counts))


def beside_expansions(other: tuple[str, Any]) -> Fault:
    """A fixed shape that is to have something else too."""

    def put(request: pb.GenerateRequest) -> None:
        setattr(request.speculation.shape, *other)
        request.speculation.shape.expansions.append(2)

    return Fault("speculation.shape.expansions", [2], put)


def predicted(**fields: Any) -> Fault:
    """A prediction where nothing is proposed."""

    def put(request: pb.GenerateRequest) -> None:
        request.MergeFrom(pb.GenerateRequest(**fields))
        request.speculation.enabled = False

    return Fault("prediction", "present", put)


def predicted_ids(token_ids: list[int], value: int, place: str = "") -> Fault:
    """Token ids of a prediction, too many or one that is none."""
    return Fault("prediction" + place, value, lambda request: request.prediction_token_ids.token_ids.extend(token_ids))


def prompted(field: str, value: object, token_ids: list[int] | None) -> Fault:
    """A prompt of token ids, or none at all."""

    def put(request: pb.GenerateRequest) -> None:
        request.ClearField("text")
        if token_ids is not None:
            request.token_ids.token_ids.extend(token_ids)
            request.token_ids.SetInParent()

    return Fault(field, value, put)


def numbered_prompts(token_id: int, place: int) -> Fault:
    """Token ids among which one is none."""
    return prompted(f"token_ids.{place}", token_id, [*range(place), token_id, 5])


def strings(path: str, most: int) -> Faults:
    """Strings that are empty or too long, or too many of them."""
    return listed(path, st.sampled_from(("", LONG, "é" * 5000)), "good") | too_many(path, most, "good")


def penalised(length_penalty: float) -> Fault:
    """Beams with a length penalty that there is not."""
    beams = pb.BeamSearch(width=2, length_penalty=length_penalty)
    return Fault("beam_search.length_penalty", length_penalty, lambda request: request.beam_search.CopyFrom(beams))


def shaped(field: str, value: object, **constraint: Any) -> Fault:
    """A shape that no answer can have, or that cannot be read."""
    made = pb.Constraint(**constraint)
    return Fault(f"constraint{field}", value, lambda request: request.constraint.CopyFrom(made))


def shapes(kind: str, *texts: str) -> Faults:
    """Faults of one kind of shape, by their text."""
    return st.sampled_from([shaped(f".{kind}", text, **{kind: text}) for text in ("", *texts)])


def chosen(*texts: str) -> Fault:
    """Choices of which one is none."""
    return shaped(".choices", [*texts], choices=pb.Choices(texts=texts))


FAULTS: dict[str, Faults] = {
    "constraint.json_schema": shapes(
        "json_schema", "{", '{"not": {}}', '{"type": "fox"}', '{"$ref": "http://a.example"}'
    )
    | st.integers(65, 900).map(
        lambda depth: shaped(".json_schema", f"nested {depth} deep", json_schema="[" * depth + "]" * depth)
    ),
    "constraint.regex": shapes("regex", "(", "(?=a)", "x{200000}")
    | st.integers(8193, 20_000).map(lambda length: shaped(".regex", length, regex="a" * length)),
    "constraint.choices.texts": st.sampled_from([chosen(), chosen(""), chosen("fox", "")])
    | st.integers(1025, 2000).map(lambda count: shaped(".choices", count, choices=pb.Choices(texts=["a"] * count))),
    "constraint.lark": shapes("lark", "start", "start: fox", "start: %json 5"),
    "constraint.gbnf": shapes("gbnf", "root", "root ::= fox"),
    "constraint.structural_tag": shapes("structural_tag", "{"),
    "constraint.whitespace": st.sampled_from(
        [
            shaped(".whitespace", "(", json_schema="{}", whitespace="("),
            shaped(".whitespace", " ", regex="a", whitespace=" "),
            shaped("", "without a kind", whitespace=" "),
        ]
    ),
    "constraint.is_lenient": st.just(shaped(".is_lenient", True, regex="a", is_lenient=True)),
    "beam_search.width": set_in("beam_search.width", integers(2, 8)),
    "beam_search.length_penalty": st.builds(penalised, numbers(lambda value: -10 <= value <= 10)),
    "beam_search.early_stopping": set_in("beam_search.early_stopping", integers(0, 3)),
    "text": st.just(Fault("prompt", "", lambda request: setattr(request, "text", ""))),
    "token_ids": st.builds(numbered_prompts, integers(0, VOCABULARY_SIZE - 1), st.integers(0, 3))
    | st.sampled_from((prompted("prompt", "absent", None), prompted("prompt", [], []))),
    "max_tokens": set_in("max_tokens", integers(1)),
    "stop": strings("stop", 64),
    "stop_token_ids": listed("stop_token_ids", integers(0, VOCABULARY_SIZE - 1), 5) | too_many("stop_token_ids", 64, 5),
    "logprob_count": set_in("logprob_count", integers(0, 20)),
    "sample_count": set_in("sample_count", integers(1, 8)),
    "banned_words": strings("banned_words", 64) | listed("banned_words", st.just(RARE), "good"),
    "echo": set_in("echo", st.just(True)),
    "sampling.temperature": set_in("sampling.temperature", numbers(lambda value: 0 <= value <= 100)),
    "sampling.top_k": set_in("sampling.top_k", integers(0)),
    "sampling.top_p": set_in("sampling.top_p", numbers(lambda value: 0 < value <= 1)),
    "sampling.min_p": set_in("sampling.min_p", numbers(lambda value: 0 <= value <= 1)),
    "sampling.repetition_penalty": set_in("sampling.repetition_penalty", numbers(lambda value: 0 < value <= 100)),
    "sampling.presence_penalty": set_in("sampling.presence_penalty", numbers(lambda value: -2 <= value <= 2)),
    "sampling.frequency_penalty": set_in("sampling.frequency_penalty", numbers(lambda value: -2 <= value <= 2)),
    "sampling.logit_bias": st.builds(biased, integers(0, VOCABULARY_SIZE - 1), st.just(1.0))
    | st.builds(biased, st.integers(0, VOCABULARY_SIZE - 1), numbers(lambda value: -100 <= value <= 100))
    | st.sampled_from((301, 4096)).map(many_biases),
    "sampling.min_tokens": set_in("sampling.min_tokens", integers(0, MAX_TOKENS)),
    "speculation.draft_count": set_in("speculation.draft_count", integers(0, MAX_DRAFT_COUNT)),
    "speculation.rule": set_in("speculation.rule", integers(0, max(RULES.values()))),
    "speculation.drafter": drafters(),
    "speculation.drafters": teams(),
    "speculation.shape.max_depth": set_in("speculation.shape.max_depth", integers(0, 32)),
    "speculation.shape.max_children": set_in("speculation.shape.max_children", integers(0, 8)),
    "speculation.shape.max_width": set_in("speculation.shape.max_width", integers(0, 64)),
    "speculation.shape.is_static": st.sampled_from([("is_static", True), ("max_width", 2)]).map(beside_expansions),
    "speculation.shape.expansions": listed("speculation.shape.expansions", integers(1, 8), 1)
    | too_many("speculation.shape.expansions", 32, 1)
    | st.lists(st.integers(2, 8), min_size=2, max_size=8).map(lambda counts: grown(*counts)),
    "speculation.acceptance.lenience": settings_of("lenience"),
    "speculation.acceptance.typical_epsilon": settings_of("typical_epsilon"),
    "speculation.acceptance.typical_delta": settings_of("typical_delta"),
    "prediction_text": st.text().map(lambda text: predicted(prediction_text=text)),
    "prediction_token_ids.token_ids": st.builds(
        lambda token_id, place: predicted_ids([*range(place), token_id, 5], token_id, f".{place}"),
        integers(0, VOCABULARY_SIZE - 1),
        st.integers(0, 3),
    )
    | st.sampled_from((CONTEXT_LEN + 1, 20_000)).map(lambda count: predicted_ids([5] * count, count)),
    "cache_salt": set_in("cache_salt", st.sampled_from(("x" * 65, "é" * 33, LONG, "é" * 5000))),
}
# Every value of these is a good one.
FAULTLESS = {"seed", "sampling.ignore_eos", "speculation.enabled", "speculation.return_rounds", "unrecorded"}


def paths(descriptor: Descriptor = pb.GenerateRequest.DESCRIPTOR, prefix: str = "") -> set[str]:
    """All fields of a request, and those of the settings within it."""
    found = set()
    for field in descriptor.fields:
        inner = None if field.is_repeated or field.name == "token_ids" else field.message_type
        found |= {prefix + field.name} if inner is None else paths(inner, f"{prefix}{field.name}.")
    return found
