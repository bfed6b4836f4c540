"""One chunk on a slab of matrix states in VMEM, with matrix products."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.recurrent.tpu.products import FLOAT32_TERMS, Terms, product, terms_of
from pallas_kernels.recurrent.tpu.slabs import pack_rows, unpack_rows
from pallas_kernels.recurrent.triangle import unit_lower_inverse


def unpack_slab(size: int, packed: bool, words, state_ref) -> None:
    """Blocks `[size, 128]` of words into `state_ref [slab, size, 128]`."""
    halves = 2 if packed else 1
    for block in range(state_ref.shape[0]):
        rows = slice(block // halves * size, (block // halves + 1) * size)
        state_ref[block] = unpack_rows(words[rows], packed, block % halves)


def pack_slab(size: int, packed: bool, state_ref, words) -> None:
    """The inverse of `unpack_slab`."""
    halves = 2 if packed else 1
    for first in range(0, state_ref.shape[0], halves):
        rows = slice(first // halves * size, (first // halves + 1) * size)
        words[rows] = pack_rows([state_ref[first + half] for half in range(halves)], packed)


def chunk_slab(
    head_size: int, sharing: int, terms: int, state_ref, num_tokens, operand_refs, out_ref
) -> None:
    """`sharing` blocks of the slab read one key head; rows past the tokens are zero in all operands.

    operand_refs: q, k `[1, keys, L, size]`; v `[1, slab, L, 128]`; the logarithms of decays
    `[1, slab, heads of a block, L]`; for the delta rule beta `[1, slab, L, 128]`.
    terms: of a number in products. Stages run over all blocks of the slab, so that their products overlap.
    """
    del num_tokens
    q_ref, k_ref, v_ref, logs_ref, *beta_refs = operand_refs
    slab, length = v_ref.shape[1], v_ref.shape[2]
    blocks = range(slab)
    keys = [block // sharing for block in blocks]
    row = lax.broadcasted_iota(jnp.int32, (length, length), 0)
    column = lax.broadcasted_iota(jnp.int32, (length, length), 1)

    def split(x: jax.Array) -> Terms:
        return terms_of(x, terms)

    logs = [[logs_ref[0, block, head : head + 1] for head in range(logs_ref.shape[2])] for block in blocks]
    between = [[_decays_between(log) for log in of_block] for of_block in logs]
    from_start = [_decays(of_block, row >= column, head_size) for of_block in logs]
    to_end = [_decays(of_block, row < column, head_size) for of_block in logs]
    k = [split(k_ref[0, key]) for key in range(k_ref.shape[1])]
    # The delta rule asks for what its keys see as well: below what the queries do.
    asking = [q_ref[0, key] for key in range(q_ref.shape[1])]
    if beta_refs:
        asking = [jnp.concatenate([q, k_ref[0, key]], axis=0) for key, q in enumerate(asking)]
    asking = [split(x) for x in asking]
    alike = [product(x, y, 1, 1) for x, y in zip(asking, k, strict=True)]
    seen = [product(asking[keys[b]], split(state_ref[b]), 1, 0) for b in blocks]
    added = [v_ref[0, block] for block in blocks]
    for beta_ref in beta_refs:  # a block is one head
        lower = [
            jnp.where(row > column, beta_ref[0, b, :, :1] * between[b][0] * alike[keys[b]][length:], 0)
            for b in blocks
        ]
        wanted = [beta_ref[0, b] * (added[b] - from_start[b] * seen[b][length:]) for b in blocks]
        inverses = unit_lower_inverse(lower, lambda x, y: product(split(x), split(y), 1, 0))
        added = [product(split(x), split(y), 1, 0) for x, y in zip(inverses, wanted, strict=True)]
    for b in blocks:
        weights = jnp.concatenate([decays * alike[keys[b]][:length] for decays in between[b]], axis=1)
        own = product(split(weights), split(_by_head(added[b], head_size)), 1, 0)
        out_ref[0, b] = from_start[b] * seen[b][:length] + own
    for b in blocks:
        left = from_start[b][length - 1 :] * state_ref[b]
        state_ref[b] = left + product(k[keys[b]], split(to_end[b] * added[b]), 0, 0)


def _decays_between(logs: jax.Array) -> jax.Array:
    """`[L, L]`: exp of the sum of `logs [1, L]` after token j up to token i, 0 for j after i.

    Each sum is taken by itself. As differences of running sums, those after a strong decay would have its
    rounding error.
    """
    shape = (logs.shape[1], logs.shape[1])
    row, column = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in range(2))
    up_to = terms_of(jnp.where(row >= column, logs, 0), FLOAT32_TERMS)
    sums = product(up_to, ((row > column).astype(jnp.bfloat16),), 1, 0)
    return jnp.where(row >= column, jnp.exp(sums), 0)


def _decays(logs: list[jax.Array], tokens: jax.Array, head_size: int) -> jax.Array:
    """`[L, 128]`: exp of each head's `logs [1, L]` summed over rows of `tokens bool[L, L]`, on its lanes."""
    columns = [jnp.exp(jnp.where(tokens, log, 0).sum(axis=1, keepdims=True)) for log in logs]
    shape = (tokens.shape[0], head_size)
    return jnp.concatenate([jnp.broadcast_to(column, shape) for column in columns], axis=1)


def _by_head(value: jax.Array, head_size: int) -> jax.Array:
    """`[L, 128]` once for each head, one below the other, zero on the other heads' lanes."""
    heads = value.shape[1] // head_size
    if heads == 1:
        return value
    head = lax.broadcasted_iota(jnp.int32, value.shape, 1) // head_size
    return jnp.concatenate([jnp.where(head == index, value, 0) for index in range(heads)], axis=0)
