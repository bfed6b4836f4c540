"""Where a prefill chunk ends."""

from collections.abc import Collection


def chunk_end(
    start: int, limit: int, prefill_end: int, alignment: int, keep: Collection[int] = (), num_inside: int = 0
) -> int:
    """The end of a chunk that begins at `start` and may not pass `limit` (start < limit <= prefill_end).

    A recurrent layer's state is kept where a chunk ends, and at up to `num_inside` positions inside it. So a
    chunk stops at that one of the positions `keep` (those a later request can resume from) which comes after
    so many others, and otherwise, unless it ends the prefill, at a multiple of `alignment` where it reaches
    one. A chunk too small to reach one ends anywhere: its state runs on in the next chunk.
    """
    if not keep:
        return limit
    stops = sorted(position for position in keep if start < position < limit)
    if len(stops) > num_inside:
        return stops[num_inside]
    if limit == prefill_end or limit in keep:
        return limit
    aligned = limit // alignment * alignment
    return aligned if aligned > start else limit
