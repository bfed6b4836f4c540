"""The recurrent operations: each computes a step's tokens and updates one part of their sequences' states.

All take the pool `pages uint32[num_pages, page_rows, 128]` (in place where it is donated), a `RaggedBatch`, a
`StateTable`, and where the part is: `layout`, `part`, `layer_slot`, `layer_slots` (see `StatePlace`). A
sequence starts from the state in `table.read`, ends in `table.write`, and leaves the states that
`table.checkpoint_lens` asks for in `table.checkpoint`. Padding tokens change no state and get 0. Other parts
of the blocks are left as they are, so a layer calls one operation for each part of its state.

Computation is in float32, states are rounded to the part's dtype where they are stored; outputs have the
dtype of the first argument. `implementation` is "reference", "xla", "pallas_tpu" or, but for convolutions
alone, "pallas_gpu" or "numba" (None: the platform's). All raise ValueError where shapes disagree.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.batch import RaggedBatch, num_tokens
from pallas_kernels.recurrent.checks import check_convolution, check_part, check_shape, place_in
from pallas_kernels.recurrent.choice import choose
from pallas_kernels.recurrent.conv_delta import ConvDeltaInputs, ConvDeltaPlace
from pallas_kernels.recurrent.inputs import DeltaInputs, KeyScaling, SelectiveInputs, SsdInputs
from pallas_kernels.recurrent.known import (
    CAUSAL_CONV1D,
    CONV_DELTA_RULE,
    GATED_DELTA_RULE,
    SELECTIVE_SCAN,
    SSD,
)
from pallas_kernels.recurrent.outputs import StepResult
from pallas_kernels.recurrent.state_layout import StateLayout
from pallas_kernels.recurrent.state_table import StateTable


def causal_conv1d(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    pages: jax.Array,
    batch: RaggedBatch,
    table: StateTable,
    *,
    layout: StateLayout,
    part: int,
    layer_slot: int | jax.Array,
    layer_slots: int,
    activation: str | None = None,
    implementation: str | None = None,
) -> StepResult:
    """A causal depthwise convolution: `y[t, c] = bias[c] + sum_k weight[c, k] x[t - K + 1 + k, c]`.

    `x [T, C]`, `weight [C, K]`, `bias [C]` or None; the part is `[C, K - 1]`, the last inputs, oldest first.
    `activation` is None or "silu", applied to y.
    """
    place = place_in(pages, layout, part, layer_slot, layer_slots)
    check_convolution(x, weight, bias, activation, batch, place)
    run = choose(CAUSAL_CONV1D, place, implementation)
    out, pages = run(x, weight, bias, pages, batch, table, place, silu=activation == "silu")
    return StepResult(out.astype(x.dtype), pages)


def selective_scan(
    x: jax.Array,
    dt: jax.Array,
    a: jax.Array,
    b: jax.Array,
    c: jax.Array,
    d: jax.Array,
    pages: jax.Array,
    batch: RaggedBatch,
    table: StateTable,
    *,
    layout: StateLayout,
    part: int,
    layer_slot: int | jax.Array,
    layer_slots: int,
    implementation: str | None = None,
) -> StepResult:
    """Mamba 1: `h = exp(dt a) h + dt x b`, `y = c . h + d x` for every channel; the part h is `[C, N]`.

    `x, dt [T, C]` (dt after bias and softplus), `a [C, N]` negative, `b, c [T, N]`, `d [C]`.
    """
    place = place_in(pages, layout, part, layer_slot, layer_slots)
    tokens = num_tokens(batch)
    if a.ndim != 2:
        raise ValueError(f"a must be [C, N], got {list(a.shape)}")
    channels, size = a.shape
    for name, value in {"x": x, "dt": dt}.items():
        check_shape(name, value, (tokens, channels))
    for name, value in {"b": b, "c": c}.items():
        check_shape(name, value, (tokens, size))
    check_shape("d", d, (channels,))
    check_part(place, (channels, size))
    run = choose(SELECTIVE_SCAN, place, implementation)
    inputs = SelectiveInputs(x, dt, a.astype(jnp.float32), b, c, d.astype(jnp.float32))
    out, pages = run(inputs, pages, batch, table, place)
    return StepResult(out.astype(x.dtype), pages)


def ssd(
    x: jax.Array,
    dt: jax.Array,
    a: jax.Array,
    b: jax.Array,
    c: jax.Array,
    d: jax.Array | None,
    pages: jax.Array,
    batch: RaggedBatch,
    table: StateTable,
    *,
    layout: StateLayout,
    part: int,
    layer_slot: int | jax.Array,
    layer_slots: int,
    implementation: str | None = None,
) -> StepResult:
    """Mamba 2: `h = exp(dt a) h + dt x b^T`, `y = h c + d x` for every head; the part h is `[H, P, N]`.

    `x [T, H, P]`, `dt [T, H]` (after bias and softplus), `a [H]` negative, `b, c [T, G, N]` with H a multiple
    of G, head h reading group `h // (H / G)`, `d [H]` or None.
    """
    place = place_in(pages, layout, part, layer_slot, layer_slots)
    tokens = num_tokens(batch)
    if x.ndim != 3 or b.ndim != 3 or x.shape[1] % b.shape[1]:
        raise ValueError(
            f"x must be [T, H, P] and b [T, G, N] with H a multiple of G, "
            f"got {list(x.shape)}, {list(b.shape)}"
        )
    _, heads, head_size = x.shape
    check_shape("x", x, (tokens, heads, head_size))
    check_shape("dt", dt, (tokens, heads))
    check_shape("a", a, (heads,))
    for name, value in {"b": b, "c": c}.items():
        check_shape(name, value, (tokens, *b.shape[1:]))
    if d is not None:
        check_shape("d", d, (heads,))
        d = d.astype(jnp.float32)
    check_part(place, (heads, head_size, b.shape[2]))
    run = choose(SSD, place, implementation, b.shape[1])
    out, pages = run(SsdInputs(x, dt, a.astype(jnp.float32), b, c, d), pages, batch, table, place)
    return StepResult(out.astype(x.dtype), pages)


def gated_delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    pages: jax.Array,
    batch: RaggedBatch,
    table: StateTable,
    *,
    layout: StateLayout,
    part: int,
    layer_slot: int | jax.Array,
    layer_slots: int,
    scale: float,
    l2norm_eps: float | None = None,
    implementation: str | None = None,
) -> StepResult:
    """Gated DeltaNet: `S = exp(g) S`, `S = S + beta (v - S k) k^T`, `o = scale S q` for every head.

    The part S is `[Hv, dv, dk]`.
    `q, k [T, Hk, dk]`, `v [T, Hv, dv]`, `g, beta [T, Hv]` with Hv a multiple of Hk, value head h reading key
    head `h // (Hv / Hk)`. With `l2norm_eps` q and k are first divided by `sqrt(sum of squares + eps)`, else
    they come normalised. Returns o `[T, Hv, dv]`.
    """
    place = place_in(pages, layout, part, layer_slot, layer_slots)
    tokens = num_tokens(batch)
    if k.ndim != 3 or v.ndim != 3 or v.shape[1] % k.shape[1]:
        raise ValueError(
            f"k must be [T, Hk, dk] and v [T, Hv, dv] with Hv a multiple of Hk, "
            f"got {list(k.shape)}, {list(v.shape)}"
        )
    _, heads, value_size = v.shape
    for name, value in {"q": q, "k": k}.items():
        check_shape(name, value, (tokens, *k.shape[1:]))
    check_shape("v", v, (tokens, heads, value_size))
    for name, value in {"g": g, "beta": beta}.items():
        check_shape(name, value, (tokens, heads))
    check_part(place, (heads, value_size, k.shape[2]))
    run = choose(GATED_DELTA_RULE, place, implementation, k.shape[1])
    scaling = KeyScaling(scale, l2norm_eps)
    out, pages = run(DeltaInputs(q, k, v, g, beta), scaling, pages, batch, table, place)
    return StepResult(out.astype(q.dtype), pages)


def conv_delta_rule(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    g: jax.Array,
    beta: jax.Array,
    pages: jax.Array,
    batch: RaggedBatch,
    table: StateTable,
    *,
    layout: StateLayout,
    parts: tuple[int, int],
    layer_slot: int | jax.Array,
    layer_slots: int,
    scale: float,
    l2norm_eps: float | None = None,
    activation: str | None = None,
    implementation: str | None = None,
) -> StepResult:
    """`causal_conv1d` of `x [T, C]`, then `gated_delta_rule` of its outputs in x's dtype: the queries of all
    heads, then all keys, then all values. `parts` are the convolution's and the matrices'.

    A step of decodes passes over the states of both once on a TPU. Returns o `[T, Hv, dv]`.
    """
    conv, state = (place_in(pages, layout, part, layer_slot, layer_slots) for part in parts)
    check_convolution(x, weight, bias, activation, batch, conv)
    if len(state.shape) != 3:
        raise ValueError(f"part {state.part} of the state must be [Hv, dv, dk], got {list(state.shape)}")
    for name, value in {"g": g, "beta": beta}.items():
        check_shape(name, value, (num_tokens(batch), state.shape[0]))
    place = ConvDeltaPlace(conv=conv, state=state)
    run = choose(CONV_DELTA_RULE, place, implementation, place.key_heads)
    inputs = ConvDeltaInputs(x, weight, bias, activation == "silu", g, beta)
    out, pages = run(inputs, KeyScaling(scale, l2norm_eps), pages, batch, table, place)
    return StepResult(out.astype(x.dtype), pages)
