"""Recurrent operations on a GPU: steps of decodes by the decode kernel, all others as on any platform."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.batch import RaggedBatch
from pallas_kernels.layout import LANES
from pallas_kernels.recurrent.gpu.decode_kernel import LineInputs, decode_lines
from pallas_kernels.recurrent.inputs import SCALED, DeltaInputs, SelectiveInputs, SsdInputs
from pallas_kernels.recurrent.outputs import StepResult
from pallas_kernels.recurrent.state_place import StatePlace
from pallas_kernels.recurrent.state_table import StateTable
from pallas_kernels.recurrent.xla.delta import gated_delta_rule_xla
from pallas_kernels.recurrent.xla.selective import selective_scan_xla
from pallas_kernels.recurrent.xla.ssd import ssd_xla


def selective_scan_gpu(
    inputs: SelectiveInputs,
    pages: jax.Array,
    batch: RaggedBatch,
    table: StateTable,
    place: StatePlace,
    *,
    interpret: Any = None,
) -> StepResult:
    """Same contract as `selective_scan_reference`. `interpret` is `plgpu.kernel`'s."""
    if not _is_plain_decode(batch, table):
        return selective_scan_xla(inputs, pages, batch, table, place)
    x, dt, b, c = (_first_rows(value, table) for value in (inputs.x, inputs.dt, inputs.b, inputs.c))
    lines = LineInputs(
        added=_in_lines(dt * x),
        decay=_in_lines(dt),
        b=b[:, None],
        c=c[:, None],
        rates=_in_lines(inputs.a.T),
    )
    out, pages = decode_lines(lines, pages, batch.num_decodes, table, place, interpret=interpret)
    return StepResult(_by_token(out.reshape(x.shape) + inputs.d * x, inputs.x, batch), pages)


def ssd_gpu(
    inputs: SsdInputs,
    pages: jax.Array,
    batch: RaggedBatch,
    table: StateTable,
    place: StatePlace,
    *,
    interpret: Any = None,
) -> StepResult:
    """Same contract as `ssd_reference`. `interpret` is `plgpu.kernel`'s."""
    if not _is_plain_decode(batch, table):
        return ssd_xla(inputs, pages, batch, table, place)
    x, dt, b, c = (_first_rows(value, table) for value in (inputs.x, inputs.dt, inputs.b, inputs.c))
    decay = jnp.broadcast_to(jnp.exp(dt * inputs.a)[..., None], x.shape)
    lines = LineInputs(added=_in_lines(dt[..., None] * x), decay=_in_lines(decay), b=b, c=c)
    out, pages = decode_lines(lines, pages, batch.num_decodes, table, place, interpret=interpret)
    out = out.reshape(x.shape)
    if inputs.d is not None:
        out = out + inputs.d[:, None] * x
    return StepResult(_by_token(out, inputs.x, batch), pages)


def gated_delta_rule_gpu(
    inputs: DeltaInputs,
    pages: jax.Array,
    batch: RaggedBatch,
    table: StateTable,
    place: StatePlace,
    *,
    interpret: Any = None,
) -> StepResult:
    """Same contract as `gated_delta_rule_reference`. `interpret` is `plgpu.kernel`'s."""
    if not _is_plain_decode(batch, table):
        return gated_delta_rule_xla(inputs, SCALED, pages, batch, table, place)
    q, k, v, g, beta = (_first_rows(value, table) for value in inputs)
    decay, beta = (jnp.broadcast_to(value[..., None], v.shape) for value in (jnp.exp(g), beta))
    lines = LineInputs(added=_in_lines(v), decay=_in_lines(decay), b=k, c=q, beta=_in_lines(beta))
    out, pages = decode_lines(lines, pages, batch.num_decodes, table, place, interpret=interpret)
    return StepResult(_by_token(out.reshape(v.shape), inputs.v, batch), pages)


def _is_plain_decode(batch: RaggedBatch, table: StateTable) -> bool:
    return batch.decode_only and table.checkpoint.shape[1] == 0


def _first_rows(value: jax.Array, table: StateTable) -> jax.Array:
    """A token of each sequence in float32: those of decodes come first. Rows that have none are 0."""
    rows = table.read.shape[0]
    missing = max(rows - value.shape[0], 0)
    return jnp.pad(value.astype(jnp.float32), [(0, missing)] + [(0, 0)] * (value.ndim - 1))[:rows]


def _in_lines(value: jax.Array) -> jax.Array:
    """`[N, channels...]` as `[N, lines, 128]`."""
    return value.reshape(value.shape[0], -1, LANES)


def _by_token(out: jax.Array, like: jax.Array, batch: RaggedBatch) -> jax.Array:
    """Rows of sequences as tokens, as many as `like` has; 0 for padding."""
    seq = jnp.minimum(batch.seq_ids, out.shape[0] - 1)
    decodes = (batch.seq_ids < batch.num_decodes).reshape(-1, *(1 for _ in like.shape[1:]))
    return jnp.where(decodes, out[seq], 0)
