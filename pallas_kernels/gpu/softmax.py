"""Scores of a softmax in powers of two: their scale, their mask and the sum of their exponentials."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.settings import AttentionSettings

HIDDEN = -1e30  # a masked score: exp2 gives 0, and a difference of two of them is not NaN
LOG2_E = 1.4426950408889634


def scaled_scores(products: jax.Array, settings: AttentionSettings) -> jax.Array:
    """Scores from products of queries and keys, to base 2: after scale and softcap, times log2(e)."""
    if settings.softcap is None:
        return products * (settings.scale * LOG2_E)
    # tanh from an exponential: the GPU's own is good to 11 bits only.
    power = jnp.exp2(products * (2 * LOG2_E * settings.scale / settings.softcap))
    return (1.0 - 2.0 / (1.0 + power)) * (settings.softcap * LOG2_E)


def visible_slots(
    shape: tuple[int, int],
    layout: Any,
    first_row: jax.Array,
    start: jax.Array,
    group: int,
    settings: AttentionSettings,
) -> jax.Array:
    """Which of the tokens from position `start` on each row sees, bool `shape`, in registers of `layout`.

    Row r is a query at position `(first_row + r) // group`.
    """
    slot_position = start + plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)
    row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)
    row_position = lax.div(first_row + row, jnp.int32(group))
    return (slot_position <= row_position) & (slot_position >= settings.first_visible(row_position))


def mass_of(top: jax.Array, total: jax.Array) -> jax.Array:
    """Logarithm to base 2 of `total * 2**top`; `HIDDEN` where the total is 0."""
    return jnp.where(total > 0, top + jnp.log2(jnp.where(total > 0, total, 1.0)), HIDDEN)
