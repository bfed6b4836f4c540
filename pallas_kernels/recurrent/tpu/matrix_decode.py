"""One token on a slab of matrix states in VMEM."""

import jax.numpy as jnp

from pallas_kernels.recurrent.tpu.slabs import pack_rows, unpack_rows


def decode_slab(size: int, sharing: int, packed: bool, in_buffer, out_buffer, operand_refs, out_ref) -> None:
    """`in_buffer` and `out_buffer` hold blocks `[size, 128]`; `sharing` blocks of the slab read one key head.

    operand_refs: q, k `[1, 1, keys, size]`; v, decay and, for the delta rule, beta `[1, 1, slab, 128]`.
    """
    q_ref, k_ref, v_ref, decay_ref, *beta_refs = operand_refs
    slab = v_ref.shape[2]
    q_columns, k_columns = q_ref[0, 0].T, k_ref[0, 0].T  # [size, keys]
    halves = 2 if packed else 1
    for first in range(0, slab, halves):
        rows = slice(first // halves * size, (first // halves + 1) * size)
        words = in_buffer[rows]
        states = []
        for block in range(first, first + halves):
            key = block // sharing
            k, q = k_columns[:, key : key + 1], q_columns[:, key : key + 1]
            state = unpack_rows(words, packed, block - first) * decay_ref[0, 0, block : block + 1]
            added = v_ref[0, 0, block : block + 1]
            for beta_ref in beta_refs:
                seen = (k * state).sum(axis=0, keepdims=True)
                added = beta_ref[0, 0, block : block + 1] * (added - seen)
            state = state + k * added
            out_ref[0, 0, block : block + 1] = (q * state).sum(axis=0, keepdims=True).astype(jnp.float32)
            states.append(state)
        out_buffer[rows] = pack_rows(states, packed)
