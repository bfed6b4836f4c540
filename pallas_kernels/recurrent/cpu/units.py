"""A state cut into units that are computed by themselves: some channels of Mamba 1, or blocks of matrices."""

from dataclasses import dataclass

from pallas_kernels.recurrent.state_place import StatePlace

LANES = 16
"""Channels of a register."""
WIDEST = 512
"""Channels of a unit of Mamba 1 at most: with 16 states 32 KiB, a piece of some microseconds."""


@dataclass(frozen=True, kw_only=True)
class Units:
    """Units of one part of a state; `count` of them, each `rows` rows of `width` channels next to each other.

    first_word, unit_stride, row_stride: a unit's row of words begins at word `first_word +
    unit // across * block_stride + unit % across * width + row * row_stride` of the state's pages.
    word_rows: rows of words, half of `rows` where a word holds two bfloat16 (`packed`): rows r and
    `r + high_rows` if `high_rows`, else rows 2 r and 2 r + 1. layer_slots, page_words: of the pool.
    """

    count: int
    across: int
    rows: int
    width: int
    first_word: int
    block_stride: int
    row_stride: int
    word_rows: int
    packed: bool
    high_rows: int
    layer_slots: int
    page_words: int

    @property
    def blocks(self) -> int:
        """Stored blocks of a unit."""
        return 2 if self.high_rows else 1

    @property
    def columns(self) -> int:
        """Channels of a unit."""
        return self.blocks * self.width


def cut(place: StatePlace, *, matrices: bool) -> Units | str:
    """The units of a part, of whole blocks if `matrices`; or why it cannot be cut."""
    blocks, size, lanes = place.layout.stored_shape(place.part)
    start, page_words = place.words.start, place.layout.page_words
    packed = place.layout.dtypes[place.part] == "bfloat16"
    width = lanes
    if not matrices:
        width = WIDEST
        while width > LANES and (lanes % width or start % width):
            width //= 2
    if lanes % width or width % LANES:
        return f"{lanes} channels are not a multiple of {LANES}"
    if start % width or page_words % width:
        return f"rows of {width} words from word {start} on do not lie within pages of {page_words}"
    pairs = packed and blocks % 2 == 0
    if packed and not pairs and size % 2:
        return f"{blocks} blocks of {size} rows in bfloat16 are not an even number of either"
    word_rows = size // 2 if packed and not pairs else size
    return Units(
        count=(blocks // 2 if pairs else blocks) * (lanes // width),
        across=lanes // width,
        rows=2 * size if pairs else size,
        width=width,
        first_word=start,
        block_stride=word_rows * lanes,
        row_stride=lanes,
        word_rows=word_rows,
        packed=packed,
        high_rows=size if pairs else 0,
        layer_slots=place.layer_slots,
        page_words=page_words,
    )
