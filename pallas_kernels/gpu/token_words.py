"""Where the numbers in a token's words go, and how wide arrays in shared memory hold them: all static."""

import math
from typing import NamedTuple

from pallas_kernels.gpu.shared_memory import FEWEST_LANES, TILE_LANES
from pallas_kernels.layout import LANES, AttentionPageLayout

MOST_COLUMNS = 128  # words of a token taken apart at a time; half of them where a word is four numbers


class Place(NamedTuple):
    """Some of K's numbers, or of V's, from number `first` on."""

    of_values: bool
    first: int


class Strip(NamedTuple):
    """Words [begin, stop) of each token of a plane, one or two numbers each.

    `byte` is None for pairs of bfloat16 and for float32 (which has no `high`), else 0 or 1: which of the
    bytes of both 16-bit halves are numbers.
    """

    plane: int
    begin: int
    stop: int
    byte: int | None
    low: Place
    high: Place | None

    def pieces(self, lanes: int) -> list[slice]:
        """The words in runs of equal size, at most 128, that a buffer with rows of `lanes` can be read by."""
        size = self.stop - self.begin
        most = MOST_COLUMNS if self.byte is None else MOST_COLUMNS // 2
        columns = next(count for count in range(most, 0, -lanes) if size % count == 0)
        return [slice(at, at + columns) for at in range(self.begin, self.stop, columns)]


def strips_of(layout: AttentionPageLayout) -> list[Strip]:
    """Every number of a token, once; V of latents is not told apart from their K."""
    size = layout.head_size
    if layout.is_quantised:
        half = size // 2
        return [Strip(0, 0, half, b, Place(False, b * half), Place(True, b * half)) for b in range(2)]
    if layout.dtype == "float32":
        return [
            Strip(plane, 0, words, None, Place(plane == 1, 0), None)
            for plane, words in enumerate(layout.token_words)
        ]
    low, high = ([n for piece in half for n in range(piece.start, piece.stop)] for half in layout.halves)

    def place(number: int) -> Place:
        of_values = number >= size
        return Place(of_values, number - size * of_values)

    strips, begin = [], 0
    for stop in range(1, len(low) + 1):
        if stop < len(low) and low[stop] == low[stop - 1] + 1 and high[stop] == high[stop - 1] + 1:
            continue
        strips.append(Strip(0, begin, stop, None, place(low[begin]), place(high[begin])))
        begin = stop
    return strips


class Lanes(NamedTuple):
    """Elements of a swizzled row of each array: words of each plane, K (and queries), V (and means)."""

    words: tuple[int, ...]
    keys: int
    values: int


def lanes_in(layout: AttentionPageLayout) -> Lanes | None:
    """The widest rows that every strip begins and ends at; None where some would be less than 16 elements."""
    strips = strips_of(layout)
    words = list(layout.token_words)
    cuts = [layout.head_size], [layout.value_size]
    for strip in strips:
        words[strip.plane] = math.gcd(words[strip.plane], strip.begin, strip.stop)
        for place in filter(None, (strip.low, strip.high)):
            cuts[place.of_values].extend((place.first, place.first + strip.stop - strip.begin))
    taken_apart = {strip.plane for strip in strips}
    planes = tuple(math.gcd(size, TILE_LANES) for size in words)
    keys, values = (math.gcd(TILE_LANES, *sizes) for sizes in cuts)
    if min(keys, values, *(planes[plane] for plane in taken_apart)) < FEWEST_LANES:
        return None
    return Lanes(planes, keys, values)


class PlaneRows(NamedTuple):
    """Rows of a page, as wide as a token of the plane, at which it begins: `first + head * step`."""

    first: int
    step: int


def rows_of_plane(layout: AttentionPageLayout, plane: int) -> PlaneRows | None:
    """Where a plane is in a page seen as rows of one token's words; None where it is between rows."""
    words = layout.token_words[plane]
    first = layout.first_word(0, plane)
    step = layout.first_word(1, plane) - first
    if layout.page_rows * LANES % words or first % words or step % words:
        return None
    return PlaneRows(first // words, step // words)


def padded_values(layout: AttentionPageLayout) -> int:
    """V's size as sums have it: whole tiles of 32 lanes."""
    return -(-layout.value_size // TILE_LANES) * TILE_LANES
