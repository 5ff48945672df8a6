"""One forward over many sessions, and a token drawn after every row of its logits, as plain decoding draws it.

Serves the draft's guesses and the target's own tokens. A session that cannot be served fails alone, and a tree's row
that cannot be drawn fails no session: it may be one that plain decoding would never have computed.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import structlog
import torch
from torch import Tensor

from outrider.engine.batching import Feed
from outrider.engine.devices import send
from outrider.engine.noise import Keys, first_uniforms, token_keys
from outrider.engine.ops.faults import read_ids
from outrider.engine.ops.temperature import apply_temperature, argmax_mask
from outrider.engine.runner import ModelRunner
from outrider.engine.sampling.transforms import RowContext, divisor, forbidden, mask, transform
from outrider.errors import Field, ModelFault, NoTokenLeft, OutriderError
from outrider.grammar import Bits, is_end_only
from outrider.parameters import SessionSpec

log = structlog.get_logger()


class DrawInput(NamedTuple):
    """Input of one session to a forward: its feed, and the parameters to draw with."""

    feed: Feed
    spec: SessionSpec

    @property
    def is_plain(self) -> bool:
        """Whether a temperature is all that changes the logits of its rows; then `Ops.choose` draws from them."""
        # Every row after the root stands on more output than the root, so it is as plain.
        return len(self.feed.session.token_ids) >= self.spec.plain_len


# Stands for the draw of a tree's row that has none; no vocabulary has it.
UNDRAWN = -1

# Drawn tokens of a feed's rows, the root's first; what went wrong otherwise. Only below the root a row may be UNDRAWN.
Drawn = list[int] | OutriderError


def draw_each(runner: ModelRunner, logits: Tensor, inputs: Sequence[DrawInput], ranges: Sequence[range]) -> list[Drawn]:
    """Draws with the shared noise after all rows of all sessions; the rows of inputs[i] are logits[ranges[i]].

    Everything is drawn at once; when that fails, each row alone, to find those at fault.
    """
    groups: dict[bool, list[int]] = {}
    for number, draw_input in enumerate(inputs):
        groups.setdefault(draw_input.is_plain, []).append(number)
    drawn: dict[int, Drawn] = {}
    try:
        if len(groups) == 1:
            return _draw_group(runner, rows_of(logits, ranges), inputs, *groups)
        for plain, numbers in groups.items():
            part = rows_of(logits, [ranges[number] for number in numbers])
            drawn |= zip(numbers, _draw_group(runner, part, [inputs[number] for number in numbers], plain), strict=True)
    except ValueError:
        return [
            _draw_alone(runner, rows_of(logits, [rows]), draw_input)
            for draw_input, rows in zip(inputs, ranges, strict=True)
        ]
    return [drawn[number] for number in range(len(inputs))]


def draw_from(probs: Tensor, keys: Tensor) -> Tensor:
    """Ids [B] int64 on the CPU, drawn from probs [B, V] float64 of any sum, with a uniform of each key.

    By the inverse of the cumulative distribution: a float64 probability keeps its value, which it would not as a
    float32 score. UNDRAWN where all of a row is 0.
    """
    cumulative = probs.cumsum(dim=1)
    total = cumulative[:, -1:]
    uniforms = send(first_uniforms(keys.tolist())[:, None], probs.device)
    # The product may round up to the whole sum, after which there is no token.
    levels = torch.minimum(uniforms * total, total.nextafter(torch.zeros_like(total)))
    ids = torch.searchsorted(cumulative, levels, right=True)
    return ids.masked_fill(total <= 0, UNDRAWN)[:, 0].cpu()


def scores_behind(runner: ModelRunner, logits: Tensor, inputs: Sequence[DrawInput]) -> Tensor:
    """`transform` of all rows of all inputs, which follow each other in logits; raises ValueError as it does."""
    if (
        logits.shape[1] > runner.vocabulary_size
        or len({each.spec.sampling.temperature for each in inputs}) > 1
        or not all(draw_input.is_plain for draw_input in inputs)
    ):
        contexts = [context for draw_input in inputs for context in row_contexts(draw_input)]
        return transform(logits, contexts, runner.vocabulary_size, runner.ops)
    # Nothing but one temperature is wanted: the same bits for less than half of the work, which is a good part of a
    # small model's step.
    logits = _masked(runner, logits, inputs)
    temperature = divisor(inputs[0].spec.sampling)
    if temperature == 1:
        return logits
    if not temperature:
        return argmax_mask(logits)
    return apply_temperature(logits, torch.full((1, 1), temperature, device=logits.device))


def rows_of(logits: Tensor, ranges: Sequence[range]) -> Tensor:
    """The rows of these ranges, one after the other, without a copy where they lie so already."""
    if all(before.stop == behind.start for before, behind in pairwise(ranges)):
        first, last = ranges[0].start, ranges[-1].stop
        return logits if last - first == len(logits) else logits[first:last]
    return torch.cat([logits[rows.start : rows.stop] for rows in ranges])


def row_contexts(draw_input: DrawInput) -> list[RowContext]:
    """Contexts of the rows of an input, the root's first; of a tree that grows those of the new rows."""
    session, spec = draw_input.feed.session, draw_input.spec
    ends = spec.eos_token_ids | spec.stop_token_ids
    # Where a grammar leaves nothing but an end, it may not come too soon.
    return [
        RowContext(
            spec.sampling,
            session.token_ids,
            path,
            spec.prompt_len,
            frozenset() if bits is not None and is_end_only(bits, ends) else ends,
            spec.banned,
            bits,
        )
        for path, bits in zip(_paths(draw_input), _allowed(draw_input), strict=True)
    ]


def _paths(draw_input: DrawInput) -> list[tuple[int, ...]]:
    """The draft tokens between the last committed one and each row of an input, the row's own included."""
    tree = draw_input.feed.tree
    return [
        tuple(tree.token_ids[step - 1] for step in tree.path(row))
        for row in range(draw_input.feed.num_computed, len(tree) + 1)
    ]


def _allowed(draw_input: DrawInput) -> list[Bits | None]:
    """Masks of an input's rows by its grammar; None where there is none, or no answer gets there."""
    spec, session = draw_input.spec, draw_input.feed.session
    if session.grammar is None:
        return [None] * len(draw_input.feed.depths)
    output = session.token_ids[spec.prompt_len :]
    return session.grammar.allowed(output, _paths(draw_input), spec.eos_token_ids | spec.stop_token_ids)


def _masked(runner: ModelRunner, logits: Tensor, inputs: Sequence[DrawInput]) -> Tensor:
    """logits [R, V] of all rows of plain inputs, as the first step of `transform` leaves them."""
    if all(each.feed.session.grammar is None for each in inputs):
        return logits
    return mask(logits, [bits for each in inputs for bits in _allowed(each)], runner.ops)


def before_argmax(draw_input: DrawInput) -> DrawInput:
    """At temperature 0 the same input at temperature 1 without cuts, with all edits of single tokens; else itself."""
    if draw_input.spec.sampling.temperature:
        return draw_input
    neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    sampling = draw_input.spec.sampling.model_copy(update=neutral)
    return draw_input._replace(spec=replace(draw_input.spec, sampling=sampling))


def key_column(runner: ModelRunner, keys: Sequence[int] | Keys) -> Tensor:
    """Keys [R] int64 where the runner computes."""
    # By way of numpy, because torch takes ten times as long to read a short list.
    return send(np.asarray(keys, dtype=np.int64), runner.device)


def undrawable(
    runner: ModelRunner, logits: Tensor, draw_input: DrawInput, context: RowContext, cause: ValueError
) -> OutriderError:
    """The error of a session that has no token to draw after its committed ones, from the model's rows [R, V] there.

    It says what of the request has left none. A request cannot make a model compute NaN or infinity: that is a
    ModelFault.
    """
    if not are_numbers(logits[:, : runner.vocabulary_size]):
        return model_fault(runner, len(context.committed))
    spec, grammar = draw_input.spec, draw_input.feed.session.grammar
    follower = None if grammar is None else grammar.follower
    output = context.committed[spec.prompt_len :]
    exhausted = None if follower is None else follower.exhausted(output)
    if exhausted is not None:
        return exhausted
    left, fields = set(range(runner.vocabulary_size)), list[Field]()
    if context.allowed is not None:
        allowed = _ids(context.allowed)
        fields.append(Field("constraint"))
        if follower is not None and (_ids(follower.allowed(output, ())) - allowed) & spec.stop_token_ids:
            # What the grammar takes for text would end the answer.
            fields.append(Field("stop_token_ids"))
        left &= allowed
    if left.intersection(banned := forbidden(context.banned, context.committed, context.path)):
        fields.append(Field("banned_words"))
        left.difference_update(banned)
    if left & context.held_back:
        fields.append(Field("sampling.min_tokens"))
        left -= context.held_back
    if left:
        length = len(context.committed) + len(context.path)
        return NoTokenLeft(f"no token can be drawn behind {length} tokens: {cause}")
    names = [part for field in fields for part in (field, ", ")][:-1]
    verb = "leaves" if len(fields) == 1 else "together leave"
    return NoTokenLeft([f"no token may follow the {context.output_len} of the answer: ", *names, f" {verb} none"])


def are_numbers(logits: Tensor) -> bool:
    """Whether every row [R, V] is one that something can be drawn from: a finite number in it, no NaN and no +inf."""
    # The greatest of a row carries NaN along.
    return bool(torch.isfinite(logits.amax(dim=-1)).all())


def model_fault(runner: ModelRunner, prefix_len: int) -> ModelFault:
    """Error of a session after whose first `prefix_len` tokens the model computed no numbers, which is logged."""
    name, dtype = runner.identity.model_name, runner.identity.dtype
    log.error("the model computed no numbers", model=name, dtype=dtype, num_tokens=prefix_len)
    return ModelFault(
        f"the model {name} computed NaN or infinity in {dtype} behind {prefix_len} tokens, so no token can be drawn",
        model=name,
        dtype=dtype,
    )


def _ids(bits: Bits) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")).tolist())


def _draw_group(runner: ModelRunner, logits: Tensor, inputs: Sequence[DrawInput], plain: bool) -> list[Drawn]:
    """Drawn tokens of each input, whose rows follow each other in logits; raises ValueError."""
    keys = shared_keys(inputs)
    if plain:
        temperatures: list[float] = []
        for each in inputs:
            temperatures += [divisor(each.spec.sampling)] * len(each.feed.depths)
        column = send(np.array(temperatures, dtype=np.float64), runner.device)
        ids = runner.ops.choose(
            _masked(runner, logits, inputs), column, key_column(runner, keys), runner.vocabulary_size
        )
        drawn = read_ids(ids)
    else:
        drawn = _draw(runner, logits, [context for each in inputs for context in row_contexts(each)], keys)
    ends = accumulate(len(each.feed.depths) for each in inputs)
    return [drawn[start:end] for start, end in pairwise([0, *ends])]


def _draw_alone(runner: ModelRunner, logits: Tensor, draw_input: DrawInput) -> Drawn:
    drawn: list[int] = []
    for row, (context, key) in enumerate(zip(row_contexts(draw_input), shared_keys([draw_input]), strict=True)):
        try:
            drawn += _draw(runner, logits[row : row + 1], [context], [int(key)])
        except ValueError as error:
            if not row:
                return undrawable(runner, logits[row : row + 1], draw_input, context, error)
            drawn.append(UNDRAWN)
    return drawn


def _draw(runner: ModelRunner, logits: Tensor, contexts: Sequence[RowContext], keys: Sequence[int] | Keys) -> list[int]:
    scores = transform(logits, contexts, runner.vocabulary_size, runner.ops)
    return read_ids(runner.ops.draw(scores, key_column(runner, keys)))


def shared_keys(inputs: Sequence[DrawInput]) -> Keys:
    """TOKEN keys of all rows of all inputs: draft and target draw a position with one, whichever row it is."""
    seeds: list[int] = []
    positions: list[int] = []
    for each in inputs:
        length, depths = len(each.feed.session), each.feed.depths
        seeds += [each.spec.seed] * len(depths)
        positions += [length + depth for depth in depths]
    return token_keys(seeds, positions)


def keys_below(inputs: Sequence[DrawInput], depth: int) -> Keys:
    """TOKEN keys of the last row of each input, then of the row below each, and so on: `depth` times one an input."""
    lengths = [len(each.feed.session) + each.feed.depths[-1] for each in inputs]
    positions = [length + step for step in range(depth) for length in lengths]
    return token_keys([each.spec.seed for each in inputs] * depth, positions)


def forward_and_draw(runner: ModelRunner, inputs: Sequence[DrawInput]) -> list[Drawn | None]:
    """Runs one forward over feeds that have been reserved, and draws a token after each row with the shared noise.

    None stands for an input whose prompt is not finished. The services draw in their own ways.
    """
    result = runner.forward([each.feed for each in inputs])
    ready = [each for each, rows in zip(inputs, result.ranges, strict=True) if rows is not None]
    drawn = iter(draw_each(runner, result.logits, ready, [rows for rows in result.ranges if rows is not None]))
    return [None if rows is None else next(drawn) for rows in result.ranges]
