"""One token on a slab of matrix states in VMEM, eight rows of a state at a time."""

import jax
import jax.numpy as jnp

from pallas_kernels.layout import LANES, TILE_ROWS
from pallas_kernels.recurrent.tpu.slabs import pack_rows, unpack_rows


def decode_slab(size: int, sharing: int, packed: bool, in_buffer, out_buffer, operand_refs, out_ref) -> None:
    """`in_buffer` and `out_buffer` hold blocks `[size, 128]`; `sharing` blocks of the slab read one key head.

    operand_refs: q above k `[1, 1, 2 * keys, size]`, which are turned together; v, decay and, for the delta
    rule, beta `[1, 1, slab, 128]`.
    Two blocks go together: their sums hide each other's latency, and two of bfloat16 share their words.
    """
    keys_ref, v_ref, decay_ref, *beta_refs = operand_refs
    slab, num_keys = v_ref.shape[2], keys_ref.shape[2] // 2
    columns = keys_ref[0, 0].T  # [size, 2 * keys]
    alike = (keys_ref[0, 0, :num_keys] * keys_ref[0, 0, num_keys:]).sum(axis=1, keepdims=True)  # [keys, 1]
    together = 2 if slab % 2 == 0 else 1
    for first in range(0, slab, together):
        blocks = range(first, first + together)
        keys = {block: block // sharing for block in blocks}

        def wide(row: int, keys=keys) -> dict[int, list[jax.Array]]:
            """Rows of q and k, by block, the same on all lanes."""
            tiles = {
                key: [
                    jnp.broadcast_to(columns[row : row + TILE_ROWS, at : at + 1], (TILE_ROWS, LANES))
                    for at in (key, num_keys + key)
                ]
                for key in set(keys.values())
            }
            return {block: tiles[key] for block, key in keys.items()}

        def rows_of(block: int, row: int, first=first) -> slice:
            begin = (first // 2 if packed else block) * size + row
            return slice(begin, begin + TILE_ROWS)

        def load(row: int, blocks=blocks, first=first, rows_of=rows_of) -> dict[int, jax.Array]:
            return {b: unpack_rows(in_buffer[rows_of(b, row)], packed, b - first) for b in blocks}

        def store(row: int, states: dict[int, jax.Array], first=first, rows_of=rows_of) -> None:
            if packed:
                out_buffer[rows_of(first, row)] = pack_rows(list(states.values()), packed)
                return
            for block, state in states.items():
                out_buffer[rows_of(block, row)] = pack_rows([state], packed)

        def on_lanes(ref, blocks=blocks) -> dict[int, jax.Array]:
            return {block: ref[0, 0, block : block + 1] for block in blocks}

        decay, added = on_lanes(decay_ref), on_lanes(v_ref)
        zeros = jnp.zeros((TILE_ROWS, LANES), jnp.float32)
        for beta_ref in beta_refs:
            beta, seen = on_lanes(beta_ref), dict.fromkeys(blocks, zeros)
            for row in range(0, size, TILE_ROWS):
                tiles, states = wide(row), load(row)
                seen = {b: seen[b] + tiles[b][1] * states[b] for b in blocks}
            added = {b: beta[b] * (added[b] - decay[b] * seen[b].sum(axis=0, keepdims=True)) for b in blocks}
        asked = dict.fromkeys(blocks, zeros)
        for row in range(0, size, TILE_ROWS):
            tiles, states = wide(row), load(row)
            asked = {b: asked[b] + tiles[b][0] * states[b] for b in blocks}
            store(row, {b: decay[b] * states[b] + tiles[b][1] * added[b] for b in blocks})
        for b in blocks:
            own = alike[keys[b] : keys[b] + 1] * added[b]
            out_ref[0, 0, b : b + 1] = decay[b] * asked[b].sum(axis=0, keepdims=True) + own
