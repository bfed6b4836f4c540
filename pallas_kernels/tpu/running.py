"""Softmaxes under way, to be merged."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.layout import LANES

HIDDEN = -(2.0**100)
"""A masked score: a difference of two of them is not NaN. Times a factor it is exact, so that less the
largest score, a product of its own, it is 0 even where multiplication and subtraction are fused.
"""
LOG2_E = math.log2(math.e)


class Scored(NamedTuple):
    """A run's scores `[rows, N]` in powers of two, its V, and what V's rows are to be multiplied by
    (`[rows, N]`, or None).
    """

    scores: jax.Array
    values: jax.Array
    value_scales: jax.Array | None


class Softmax(NamedTuple):
    """In powers of two, float32: `top`, `total [rows, 128]`, all lanes equal; `weighted [rows, W]`."""

    top: jax.Array
    total: jax.Array
    weighted: jax.Array

    def merge(self, other: "Softmax") -> "Softmax":
        """The softmax of both."""
        top = jnp.maximum(self.top, other.top)
        mine, others = jnp.exp2(self.top - top), jnp.exp2(other.top - top)
        return Softmax(
            top,
            self.total * mine + other.total * others,
            self.weighted * self._widen(mine) + other.weighted * self._widen(others),
        )

    def or_else(self, other: "Softmax", condition: jax.Array) -> "Softmax":
        """This one where the scalar `condition` holds, else `other`."""
        return Softmax(*(jnp.where(condition, a, b) for a, b in zip(self, other, strict=True)))

    def result(self) -> jax.Array:
        """The weighted mean; finite and without meaning for rows that saw nothing."""
        return self.weighted / self._widen(jnp.where(self.total > 0, self.total, 1.0))

    def _widen(self, x: jax.Array) -> jax.Array:
        return jnp.tile(x, (1, self.weighted.shape[1] // LANES))
