"""Which tokens a request's banned sequences forbid behind a prefix. Knows no logits; draft and target ask it alike."""

from collections.abc import Sequence


def forbidden(
    banned: Sequence[tuple[int, ...]], committed: Sequence[int], path: tuple[int, ...] = ()
) -> tuple[int, ...]:
    """Last ids of the sequences whose other ids are the end of the prefix `committed` + `path`; ids may repeat.

    A sequence of one id is forbidden everywhere. Neither a sequence nor the prefix may be empty.
    """
    reach = max(map(len, banned), default=1) - 1
    if not reach:
        return tuple(sequence[0] for sequence in banned)
    # A prefix has thousands of tokens, of which a sequence can meet these only.
    tail = (*committed[-reach:], *path)[-reach:]
    last = tail[-1]
    return tuple(
        sequence[-1]
        for sequence in banned
        # One comparison tells of nearly all sequences that they do not match here.
        if len(sequence) == 1 or (sequence[-2] == last and tail[1 - len(sequence) :] == sequence[:-1])
    )
