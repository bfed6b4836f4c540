"""Steps over pages of 8-bit numbers, quantised here in numpy, one token and head at a time."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels import AttentionPageLayout
from pallas_kernels.layout import LANES
from tests.pallas_kernels.cases import GUARD, Step, make_step, oldest_visible

LARGEST = {"int8": 127, "float8_e4m3fn": 448}


@dataclass(frozen=True, kw_only=True)
class QuantisedStep:
    """`step.history` is what the pages' numbers stand for; `written` is the pool after the step's writes."""

    step: Step
    written: np.ndarray


def quantise_by_hand(dtype: str, x: np.ndarray) -> tuple[np.ndarray, np.float32]:
    """The 8 bits of each number of `x [D]`, none of them a float8's -0, and their scale."""
    most = np.abs(x).max()
    scale = most * np.float32(1 / LARGEST[dtype])
    steps = np.float32(LARGEST[dtype] * (1 + 2.0**-18) / most if most else 0) * x  # ties go away from zero
    small = np.rint(steps).astype(np.int8) if dtype == "int8" else steps.astype(ml_dtypes.float8_e4m3fn)
    bits = small.view(np.uint8)
    return (bits if dtype == "int8" else np.where(bits == 0x80, 0, bits).astype(np.uint8)), scale


def number_of(dtype: str, bits: np.ndarray, scale: np.float32) -> np.ndarray:
    """What bits and scale stand for, float32."""
    return bits.view(np.int8 if dtype == "int8" else ml_dtypes.float8_e4m3fn).astype(np.float32) * scale


def put_token(layout: AttentionPageLayout, page: np.ndarray, slot: int, k: np.ndarray, v: np.ndarray) -> None:
    """Quantises one token `[Hkv, D]` into a page, byte by byte as the layout's docstring says."""
    heads, size, block = layout.num_kv_heads, layout.head_size, layout.block_size
    octets = page.reshape(-1).view(np.uint8)
    scales = page.reshape(-1).view(np.float32)[heads * block * size // 2 :]
    for which, x in enumerate((k, v)):
        for head in range(heads):
            bits, scale = quantise_by_hand(layout.dtype, x[head])
            token = octets[(head * block + slot) * 2 * size :][: 2 * size].reshape(size // 2, 2, 2)
            token[:, which] = bits.reshape(2, size // 2).T
            scales[(which * heads + head) * block + slot] = scale


def check_pool(layout: AttentionPageLayout, pages: jax.Array, written: np.ndarray) -> None:
    """Holds a pool against the one written by hand; padding in the row of the last scale may be zero, too."""
    got, expected = (np.array(pool).reshape(len(pool), -1) for pool in (pages, written))
    padding = slice(layout.used_words, layout.used_rows * LANES)
    expected[:, padding][got[:, padding] == 0] = 0
    np.testing.assert_array_equal(got, expected)


def make_quantised_step(
    *, dtype: str, window: int | None = None, chunk: int | None = None, **shape
) -> QuantisedStep:
    """A step as `make_step` makes them, its pages in `dtype`.

    Keys and values have the eight bits of a bfloat16, so that none is nearly, but not quite, half way.
    """
    raw = make_step(dtype="bfloat16", window=window, chunk=chunk, **shape)
    layout = AttentionPageLayout.fitting(
        block_size=raw.layout.block_size,
        num_kv_heads=raw.layout.num_kv_heads,
        head_size=raw.layout.head_size,
        dtype=dtype,
    )
    before = np.full((raw.pages.shape[0], layout.page_rows, 128), GUARD, np.uint32)
    written = before.copy()
    table, first = np.asarray(raw.table.block_ids), np.asarray(raw.table.first_block)
    history = []
    for s, ((keys, values), new) in enumerate(zip(raw.history, raw.query_lens, strict=True)):
        length = len(keys)
        for position in range(oldest_visible(length - new, window, chunk), length):
            block = table[s, position // layout.block_size - first[s]]
            page = block * raw.layer_slots + raw.layer_slot
            for pool in (before, written) if position < length - new else (written,):
                put_token(layout, pool[page], position % layout.block_size, keys[position], values[position])
        history.append(tuple(_kept(dtype, x) for x in (keys, values)))
    step = replace(raw, layout=layout, pages=jnp.asarray(before), history=history)
    return QuantisedStep(step=step, written=written)


def _kept(dtype: str, x: np.ndarray) -> np.ndarray:
    """`x [tokens, Hkv, D]` quantised and back."""
    rows = [number_of(dtype, *quantise_by_hand(dtype, row)) for row in x.reshape(-1, x.shape[-1])]
    return np.stack(rows).reshape(x.shape)
