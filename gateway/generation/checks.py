"""Checks of a request, once and before anything is spent on it; a broken limit is named."""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import mul

from gateway.generation.request import (
    MAX_DRAFTERS,
    MAX_STRING_LEN,
    MAX_TEXT_CHARS,
    CheckedRequest,
    GenerationRequest,
    Offers,
    new_seed,
)
from gateway.generation.shapes import answer_shape
from gateway.keys.tenant import salt_of
from gateway.rounds.round import LOOKUP, Place
from gateway.sessions.peer import ModelInfo
from gateway.text.tokenizer import Tokenizer
from outrider.beams import cache_tokens
from outrider.errors import Field, InvalidRequest, PromptTooLong, check_count
from outrider.parameters import (
    MAX_BANNED_LEN,
    MAX_BANNED_WORDS,
    MAX_LOGPROB_COUNT,
    MAX_SALT_BYTES,
    MAX_SAMPLES,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    Rule,
    SamplingParameters,
    SessionSpec,
)
from outrider.rpc.wire import MAX_MESSAGE_BYTES
from outrider.token_tree import TreeShape

AUTO = "auto"  # whatever is fastest, as without a name
# Bytes of a token of an echoed prompt in a message, text and number, and of each alternative beside it; at most.
ECHO_TOKEN_BYTES, ECHO_LOGPROB_BYTES = 192, 13


async def check_request(
    request: GenerationRequest, tokenizer: Tokenizer, target: ModelInfo, offers: Offers
) -> CheckedRequest:
    """Encodes and completes a request by what the services can do; raises InvalidRequest or PromptTooLong."""
    drafters = () if request.drafters == (AUTO,) else request.drafters
    _check_fields(request, drafters, offers, target)
    prompt = await _prompt(request, tokenizer, target)
    max_tokens = _max_tokens(request, len(prompt), target)
    sampling, beams = target.defaults.under(request.sampling), request.beam_search
    if beams is not None:
        _check_beam_room(len(prompt), max_tokens, beams.width, target)
        # What a search adds up are log-probabilities as they are, whatever the model recommends for samples.
        sampling = request.sampling.model_copy(update={"temperature": 1.0})
    _check_range("sampling.min_tokens", request.sampling.min_tokens, 0, max_tokens)
    banned = await _banned(request.banned_words, tokenizer, target.vocabulary_size)
    salt = salt_of(request.tenant, request.cache_salt)
    # The target ends there too: a special token is drawn as one, whatever clients read of it.
    named = (tokenizer.added_tokens[stop] for stop in request.stops if stop in tokenizer.special_tokens)
    stop_token_ids = frozenset((*request.stop_token_ids, *named))
    shape = await answer_shape(request, tokenizer, target, stop_token_ids, salt)
    spec = SessionSpec(
        token_ids=prompt,
        prompt_len=len(prompt),
        sampling=sampling,
        seed=new_seed() if request.seed is None else request.seed,
        max_len=len(prompt) + max_tokens,
        eos_token_ids=frozenset() if request.sampling.ignore_eos else target.eos_token_ids,
        stop_token_ids=stop_token_ids,
        acceptance=request.acceptance,
        banned=banned,
        logprob_count=request.logprob_count,
        prompt_logprobs=request.echo,
        draft_logprobs=request.return_rounds,
        cache_salt=salt,
        grammar="" if shape is None else shape.grammar.text,
        unrecorded=request.unrecorded,
    )
    draft_count = request.draft_count if request.speculation_enabled else 0
    if draft_count is None and request.shape is not None:
        # A fixed shape leaves no number to choose.
        draft_count = _num_rows(request.shape) or None
    prediction = await _prediction(request, drafters, draft_count, tokenizer, target, offers)
    ends = [tokenizer.piece(token_id).text for token_id in spec.eos_token_ids] if request.stops else []
    naming = (stop for stop in request.stops if tokenizer.names_special(stop) or any(name in stop for name in ends))
    return CheckedRequest(
        spec,
        request.stops,
        draft_count,
        drafters,
        request.shape,
        prediction,
        (request.sample_count or 1) if beams is None else beams.width,
        beam_search=beams,
        reading=request.reading,
        scores=request.scores,
        fills_context=spec.max_len == _place(target)[0],
        naming_stops=frozenset(naming),
        constraint=None if shape is None else shape.constraint,
        grammar=None if shape is None else shape.grammar,
    )


def _check_fields(request: GenerationRequest, drafters: Sequence[str], offers: Offers, target: ModelInfo) -> None:
    """Checks that cost nothing, because no text has to be encoded for them; raises InvalidRequest."""
    _check_drafters(drafters, request.acceptance.rule, offers)
    _check_shape(request, drafters, offers, target)
    if request.beam_search is not None:
        _check_beams(request, offers)
    _check_strings("stop", request.stops, MAX_STOPS)
    check_count("stop_token_ids", len(request.stop_token_ids), MAX_STOP_TOKEN_IDS, "ids")
    _check_token_ids("stop_token_ids", request.stop_token_ids, target)
    _check_strings("banned_words", request.banned_words, MAX_BANNED_WORDS)
    _check_range("sample_count", request.sample_count, 1, MAX_SAMPLES)
    _check_range("logprob_count", request.logprob_count, 0, MAX_LOGPROB_COUNT)
    if request.echo and request.logprob_count is None:
        raise InvalidRequest("echo", True, "false without logprob_count")
    _check_range("max_tokens", request.max_tokens, 1, 2**31 - 1)
    _check_range("speculation.draft_count", request.draft_count, 0, target.max_draft_count)
    _check_range("seed", request.seed, -(2**63), 2**63 - 1)
    for token_id in request.sampling.logit_bias:
        _check_token_id("sampling.logit_bias key", token_id, target)
    if len(request.cache_salt.encode()) > MAX_SALT_BYTES:
        raise InvalidRequest("cache_salt", request.cache_salt, f"of at most {MAX_SALT_BYTES} bytes in UTF-8")


def _check_beams(request: GenerationRequest, offers: Offers) -> None:
    """Raises InvalidRequest about what a search cannot be combined with."""
    sampling, neutral = request.sampling, SamplingParameters()
    if "temperature" in sampling.model_fields_set and sampling.temperature:
        raise InvalidRequest("sampling.temperature", sampling.temperature, ("0 or absent with ", Field("beam_search")))
    wanted: dict[str, object] = {
        f"sampling.{name}": getattr(sampling, name)
        for name in ("top_k", "top_p", "min_p")
        if getattr(sampling, name) != getattr(neutral, name)
    }
    wanted |= {
        "stop": request.stops,
        "sample_count": request.sample_count,
        "logprob_count": request.logprob_count,
        "speculation.return_rounds": request.return_rounds,
        "speculation.drafter": next(
            (each for each in request.drafters if each == LOOKUP.name or each in offers.own), ""
        ),
        "speculation.drafters": request.drafters if len(request.drafters) > 1 else (),
        "speculation.shape": request.shape,
        "prediction": None if request.prediction is None else "present",
    }
    for name, value in wanted.items():
        # Zero log-probabilities are some: those of the tokens themselves.
        if value not in (None, (), "") and value is not False:
            raise InvalidRequest(name, value, ("absent with ", Field("beam_search")))
    if request.acceptance.rule is not Rule.MATCH:
        raise InvalidRequest("speculation.rule", request.acceptance.rule, ("match with ", Field("beam_search")))


def _check_beam_room(prompt_len: int, max_tokens: int, width: int, target: ModelInfo) -> None:
    needed = cache_tokens(prompt_len, prompt_len + max_tokens, width)
    if needed > target.kv_tokens:
        message = (
            f"{width} beams of ",
            Field("max_tokens"),
            f" {max_tokens} behind a prompt of {prompt_len} tokens may need {needed} tokens of the key-value cache, "
            f"which has {target.kv_tokens}",
        )
        raise PromptTooLong(message, max_tokens=max_tokens, prompt_tokens=prompt_len, kv_tokens=target.kv_tokens)


def _check_drafters(drafters: Sequence[str], rule: Rule, offers: Offers) -> None:
    """Names that are on offer and serve the rule; several must be able to guess side by side."""
    field = "speculation.drafter" if len(drafters) == 1 else "speculation.drafters"
    check_count(field, len(drafters), MAX_DRAFTERS, "names")
    if len(set(drafters)) < len(drafters):
        raise InvalidRequest(field, list(drafters), "without repetition")
    names = offers.names
    for name in drafters:
        if name not in names and (offers.remote is not None or name == AUTO):
            raise InvalidRequest(field, name, f"one of {', '.join(names)}, or {AUTO} alone")
        places = offers.places(name, rule)
        if not places:
            fitting = ", ".join(each for each in names if offers.places(each, rule))
            raise InvalidRequest(field, name, f"one that serves the rule {rule}: {fitting}")
        if len(drafters) > 1 and places == {Place.HOSTED}:
            raise InvalidRequest(field, name, "without those in the target's process, which guess alone")


def _check_shape(request: GenerationRequest, drafters: Sequence[str], offers: Offers, target: ModelInfo) -> None:
    """A shape that some draft service can be asked for, with no more rows than may be guessed."""
    shape = request.shape
    if shape is None:
        return
    is_made = any(offers.places(name, request.acceptance.rule, shape) for name in drafters)
    if not is_made and (drafters or (offers.remote == {} and not offers.own_trees)):
        raise InvalidRequest("speculation.shape", "present", "absent where nobody makes trees")
    name, limit = "draft_count", request.draft_count
    if not limit:
        name, limit = "max_draft_count", target.max_draft_count
    num_rows = _num_rows(shape)
    if num_rows > limit:
        value = f"{list(shape.expansions)}, which are {num_rows} rows"
        raise InvalidRequest("speculation.shape.expansions", value, f"at most {name} {limit} rows")


def _num_rows(shape: TreeShape) -> int:
    """Rows of a fixed shape, 0 of any other."""
    return sum(accumulate(shape.expansions, mul))


async def _prediction(
    request: GenerationRequest,
    drafters: Sequence[str],
    draft_count: int | None,
    tokenizer: Tokenizer,
    target: ModelInfo,
    offers: Offers,
) -> tuple[int, ...]:
    """The tokens of what the answer is expected to be, which is looked up."""
    prediction = request.prediction
    if prediction is None:
        return ()
    if draft_count == 0:
        raise InvalidRequest("prediction", "present", "absent where speculation is off")
    if not offers.looks or (drafters and LOOKUP.name not in drafters):
        raise InvalidRequest("prediction", "present", f"absent unless {LOOKUP.name} is among the drafters")
    if isinstance(prediction, str):
        check_count("prediction", len(prediction), max_chars(target.context_len, tokenizer), "characters")
        prediction = await tokenizer.encode(prediction, special=False)
    check_count("prediction", len(prediction), target.context_len, "tokens")
    _check_token_ids("prediction", prediction, target)
    return tuple(prediction)


def _check_strings(name: str, strings: Sequence[str], maximum: int) -> None:
    check_count(name, len(strings), maximum, "strings")
    for index, string in enumerate(strings):
        if not 1 <= len(string) <= MAX_STRING_LEN:
            raise InvalidRequest(f"{name}.{index}", string, f"of 1 to {MAX_STRING_LEN} characters")


async def _banned(words: Sequence[str], tokenizer: Tokenizer, vocabulary_size: int) -> tuple[tuple[int, ...], ...]:
    """The usual token sequences of words that must not occur: as they begin a text, and as they go on in one."""
    sequences: dict[tuple[int, ...], None] = {}
    for index, word in enumerate(words):
        for text in (word, f" {word}"):
            sequence = await tokenizer.encode(text, special=False)
            if len(sequence) > MAX_BANNED_LEN:
                raise InvalidRequest(f"banned_words.{index}", word, f"of at most {MAX_BANNED_LEN} tokens")
            # What the model has no row for is not said anyway.
            if sequence and max(sequence) < vocabulary_size:
                sequences[sequence] = None
    return tuple(sequences)


async def _prompt(request: GenerationRequest, tokenizer: Tokenizer, target: ModelInfo) -> tuple[int, ...]:
    """The tokens of the prompt; what cannot fit is refused before time and memory are spent on its text."""
    if (request.text is None) == (request.token_ids is None):
        given = "absent" if request.text is None else "both"
        raise InvalidRequest("prompt", given, "exactly one of text and token_ids")
    if request.token_ids is not None:
        _max_tokens(request, len(request.token_ids), target)
        _check_token_ids("token_ids", request.token_ids, target)
    prompt = tuple(request.token_ids or ())
    if request.text is not None:
        size, name, place = _place(target)
        num_chars, limit = len(request.text), max_chars(size, tokenizer)
        if num_chars > limit:
            message = (Field("prompt"), f" has {num_chars} characters, but at most {limit} are taken for {place}")
            raise PromptTooLong(message, prompt_chars=num_chars, max_chars=limit, **{name: size})
        prompt = await tokenizer.encode(request.text, special=request.add_special_tokens)
        last = max(prompt, default=0)
        if last >= target.vocabulary_size:
            known = f"of tokens that the model knows: it has no row for the id {last}"
            raise InvalidRequest("prompt", tokenizer.name(last), known)
    if not prompt:
        raise InvalidRequest("prompt", request.text if request.text is not None else [], "at least one token long")
    # An echo comes in one message, which clients take up to a size only.
    token_bytes = ECHO_TOKEN_BYTES + ECHO_LOGPROB_BYTES * (request.logprob_count or 0)
    if request.echo and len(prompt) * token_bytes > MAX_MESSAGE_BYTES:
        asked = (f"false for a prompt of {len(prompt)} tokens with ", Field("logprob_count"))
        most = f" {request.logprob_count}: at most {MAX_MESSAGE_BYTES // token_bytes}"
        raise InvalidRequest("echo", True, (*asked, most))
    return prompt


def max_chars(num_tokens: int, tokenizer: Tokenizer) -> int:
    """Characters of the longest text that is encoded where there is room for so many tokens.

    Only a tokenizer that drops text, or has one token for all that it does not know, makes so few of a longer one.
    """
    return min(num_tokens * tokenizer.longest_token, MAX_TEXT_CHARS)


def _place(target: ModelInfo) -> tuple[int, str, str]:
    """Room for prompt and output: its tokens, its name among facts, and in a sentence."""
    is_context = target.context_len <= target.kv_tokens
    size, name = (target.context_len, "context_len") if is_context else (target.kv_tokens, "kv_tokens")
    return size, name, f"the {'context' if is_context else 'key-value cache'} of {size} tokens"


def check_room(prompt_len: int, target: ModelInfo) -> None:
    """Raises PromptTooLong about a prompt that leaves no room for a token after it."""
    size, name, place = _place(target)
    if prompt_len >= size:
        message = f"the prompt has {prompt_len} tokens, but must leave room for one more in {place}"
        raise PromptTooLong(message, prompt_tokens=prompt_len, **{name: size})


def _max_tokens(request: GenerationRequest, prompt_len: int, target: ModelInfo) -> int:
    """The output's limit; prompt and output must fit together into the target's context and into its cache."""
    size, name, place = _place(target)
    room = size - prompt_len
    if request.max_tokens is None or request.up_to_context:
        check_room(prompt_len, target)
    wanted = request.max_tokens
    if wanted is None:
        is_open = request.up_to_context and "max_tokens" not in target.defaults.stated
        wanted = min(room if is_open else target.defaults.max_tokens, request.most_new_tokens or room)
    if request.max_tokens is None or request.up_to_context:
        wanted = min(wanted, room)
        if request.most_tokens is not None:
            samples = request.beam_search.width if request.beam_search else request.sample_count or 1
            # One at least: when a prompt leaves no room, the key's own check says so.
            wanted = max(1, min(wanted, (request.most_tokens - prompt_len) // samples))
    if wanted > room:
        message = (f"a prompt of {prompt_len} tokens and ", Field("max_tokens"), f" {wanted} do not fit into {place}")
        raise PromptTooLong(message, max_tokens=wanted, prompt_tokens=prompt_len, **{name: size})
    return wanted


def _check_range(name: str, value: int | None, minimum: int, maximum: int) -> None:
    if value is not None and not minimum <= value <= maximum:
        raise InvalidRequest(name, value, f"between {minimum} and {maximum}")


def _check_token_ids(name: str, token_ids: Iterable[int], target: ModelInfo) -> None:
    for index, token_id in enumerate(token_ids):
        _check_token_id(f"{name}.{index}", token_id, target)


def _check_token_id(name: str, token_id: int, target: ModelInfo) -> None:
    if not 0 <= token_id < target.vocabulary_size:
        raise InvalidRequest(name, token_id, f"a token id between 0 and {target.vocabulary_size - 1}")
