"""What the recurrences are computed from: one token a row. Computation is in float32 whatever the dtypes."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.recurrent.outputs import StepResult


class SelectiveInputs(NamedTuple):
    """Mamba 1. x, dt `[T, C]`, dt after bias and softplus; a `[C, N]`, negative; b, c `[T, N]`; d `[C]`."""

    x: jax.Array
    dt: jax.Array
    a: jax.Array
    b: jax.Array
    c: jax.Array
    d: jax.Array


class SsdInputs(NamedTuple):
    """Mamba 2. x `[T, H, P]`; dt `[T, H]` after bias and softplus; a `[H]`, negative; b, c `[T, G, N]`, group
    g serving heads `g * H / G` onwards; d `[H]` or None.
    """

    x: jax.Array
    dt: jax.Array
    a: jax.Array
    b: jax.Array
    c: jax.Array
    d: jax.Array | None


class DeltaInputs(NamedTuple):
    """Gated delta rule. q, k `[T, Hk, dk]`, normalised, q times the scale; v `[T, Hv, dv]`; g `[T, Hv]`, the
    logarithm of the decay; beta `[T, Hv]`. Value head h reads key head `h // (Hv / Hk)`.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array
    beta: jax.Array


class KeyScaling(NamedTuple):
    """What becomes of queries and keys `[..., dk]` first.

    eps: they are divided by `sqrt(sum of squares + eps)`; None: they come normalised. scale: of queries.
    """

    scale: float
    eps: float | None

    def __call__(self, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        q, k = q.astype(jnp.float32), k.astype(jnp.float32)
        if self.eps is not None:
            q, k = (x * jax.lax.rsqrt(jnp.square(x).sum(axis=-1, keepdims=True) + self.eps) for x in (q, k))
        return q * self.scale, k


def scaled_first(run: Callable[..., StepResult]) -> Callable[..., StepResult]:
    """`run` for inputs whose queries and keys are still to be scaled."""

    def scaled(inputs: DeltaInputs, scaling: KeyScaling, *rest: Any, **options: Any) -> StepResult:
        q, k = scaling(inputs.q, inputs.k)
        return run(inputs._replace(q=q, k=k), *rest, **options)

    return scaled


SCALED = KeyScaling(1.0, None)
"""Of queries and keys that have been scaled already."""
