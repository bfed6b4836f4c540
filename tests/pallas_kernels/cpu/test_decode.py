"""Decode attention by numba against attention in numpy, over a pool whose other words are NaN."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import AttentionPageLayout, GroupTable, paged_attention
from pallas_kernels.cpu.decode import CHUNK, SPLIT
from pallas_kernels.operations import choose_implementation
from pallas_kernels.settings import AttentionSettings
from tests.pallas_kernels import checking
from tests.pallas_kernels.cases import Step, make_step, write_token, written_by_hand


def check(step: Step, **rest) -> None:
    """Holds the pool and the results against the definitions."""
    checking.check(step, written_by_hand(step), "numba", **rest)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", [None, 1, 3, 4, 9])
def test_mixed_steps_of_every_length_around_a_page(window: int | None, dtype: str):
    step = make_step(
        seq_lens=[1, 3, 4, 5, 40, 1, 3, 4, 5, 41],
        query_lens=[1, 1, 1, 1, 1, 1, 3, 4, 5, 17],
        window=window,
        dtype=dtype,
        head_size=16,
        spare_tokens=3,
        spare_rows=2,
    )
    check(step, window=window)


@pytest.mark.parametrize("chunk", [1, 3, 4, 16])
def test_chunks_smaller_and_larger_than_a_page(chunk: int):
    step = make_step(
        seq_lens=[1, 4, 16, 17, 40, 41], query_lens=[1, 1, 1, 1, 1, 17], chunk=chunk, head_size=16
    )
    check(step, chunk=chunk)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("heads", "group"), [(1, 1), (1, 16), (2, 3), (4, 2), (2, 7)])
def test_groups_of_every_tile_of_rows(heads: int, group: int, dtype: str):
    step = make_step(
        seq_lens=[9, 6, 14], query_lens=[1, 1, 1], heads=heads, group=group, head_size=80, dtype=dtype
    )
    check(step)


@pytest.mark.parametrize("softcap", [0.5, 2.0, 50.0, 1e4, 1e30])
def test_scores_are_capped(softcap: float):
    check(make_step(seq_lens=[9, 70], query_lens=[1, 1], head_size=64), softcap=softcap)


@pytest.mark.parametrize("window", [None, 3])
def test_sinks_take_part_in_the_softmax(window: int | None):
    step = make_step(seq_lens=[1, 9, 14], query_lens=[1, 1, 5], heads=2, group=3, head_size=16, window=window)
    check(step, window=window, sinks=np.array([-3.0, 0.0, 1.0, 2.5, 7.0, -40.0], np.float32))


@pytest.mark.parametrize(
    "sizes",
    [
        {"head_size": 64, "head_size_v": 32},
        {"head_size": 48, "head_size_v": 128},
        {"head_size": 288, "head_size_v": 256, "latent": True},
    ],
    ids=lambda sizes: "-".join(str(x) for x in sizes.values()),
)
def test_values_of_another_size_and_latents_of_float32(sizes: dict):
    check(make_step(seq_lens=[9, 6, 14], query_lens=[1, 1, 5], heads=1, group=3, window=7, **sizes), window=7)


@pytest.mark.parametrize("block_size", [16, 48])
@pytest.mark.parametrize("window", [None, 512, SPLIT + 100])
def test_sequences_around_chunks_and_pieces(window: int | None, block_size: int):
    lengths = [CHUNK, CHUNK + 1, SPLIT, SPLIT + 1, 2 * SPLIT + 77, 3]
    step = make_step(
        seq_lens=lengths,
        query_lens=[1] * len(lengths),
        heads=2,
        head_size=16,
        block_size=block_size,
        window=window,
        dtype="bfloat16",
    )
    check(step, window=window)


def test_sinks_join_what_pieces_are_merged_to():
    step = make_step(
        seq_lens=[2 * SPLIT, 5], query_lens=[1, 1], heads=1, group=2, head_size=16, block_size=64
    )
    check(step, sinks=np.array([3.0, -1.0], np.float32))


@pytest.mark.parametrize("sinks", [None, np.array([0.0], np.float32)])
def test_scores_of_minus_infinity_weigh_nothing(sinks: np.ndarray | None):
    # A whole chunk of them comes first; products in float64, as by hand, are finite.
    step = make_step(seq_lens=[2 * CHUNK], query_lens=[1], group=1, head_size=16, block_size=16)
    step = replace(step, q=jnp.full_like(step.q, 30))
    keys, values = step.history[0]
    keys = np.where(np.arange(2 * CHUNK)[:, None, None] < CHUNK + 3, np.float32(-3e38), keys)
    pages = np.array(step.pages)
    for position in range(CHUNK + 3):
        block = step.table.block_ids[0, position // 16]
        page = pages[block * step.layer_slots + step.layer_slot]
        write_token(step.layout, page, position % 16, keys[position], values[position])
    check(replace(step, pages=jnp.asarray(pages), history=[(keys, values)]), sinks=sinks)


@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFC00000, 0x7FC00001, 0x7FFFFFFF])
def test_a_query_that_is_no_number_gives_none_and_touches_no_other(bits: int):
    step = make_step(seq_lens=[70, 9, 130], query_lens=[1] * 3, heads=2, head_size=16, block_size=16)
    pages = jnp.asarray(written_by_hand(step))

    def attend(q: jax.Array) -> np.ndarray:
        place = {"layout": step.layout, "layer_slot": step.layer_slot, "layer_slots": step.layer_slots}
        return np.asarray(
            paged_attention(q, pages, step.batch, step.table, scale=0.3, implementation="numba", **place)
        )

    nan = np.array(bits, np.uint32).view(np.float32)
    broken, whole = attend(step.q.at[1].set(nan)), attend(step.q)
    assert np.isnan(broken[1]).all()
    np.testing.assert_array_equal(broken[[0, 2]], whole[[0, 2]])


def test_nothing_to_attend():
    check(make_step(seq_lens=[], query_lens=[], head_size=16, spare_rows=2, spare_tokens=4))


def test_a_sequence_has_the_same_bits_alone_and_beside_others():
    lengths = [5000, 20, 3000, 700]
    step = make_step(seq_lens=lengths, query_lens=[1] * 4, heads=2, head_size=64, block_size=16)

    @jax.jit
    def attend(q, batch, table):
        return paged_attention(
            q,
            jnp.asarray(written_by_hand(step)),
            batch,
            table,
            layout=step.layout,
            layer_slot=step.layer_slot,
            layer_slots=step.layer_slots,
            scale=0.3,
            implementation="numba",
        )

    together = np.asarray(attend(step.q, step.batch, step.table))
    for _ in range(20):  # whichever threads take the pieces
        np.testing.assert_array_equal(attend(step.q, step.batch, step.table), together)
    for seq in range(4):
        mine = jnp.array([seq] + [0] * 3)
        batch = replace(
            step.batch,
            seq_lens=jnp.where(jnp.arange(4) == 0, step.batch.seq_lens[seq], 0),
            num_decodes=jnp.int32(1),
            num_seqs=jnp.int32(1),
        )
        table = replace(
            step.table, block_ids=step.table.block_ids[mine], first_block=step.table.first_block[mine]
        )
        alone = np.asarray(attend(step.q[mine], batch, table))
        np.testing.assert_array_equal(alone[0], together[seq])
        assert (alone[1:] == 0).all()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"head_size": 24}, "heads of 24 and 24 are no multiples of 16"),
        ({"head_size": 32, "dtype": "bfloat16", "head_size_v": 16}, "K and V of different sizes"),
        ({"head_size": 32, "head_size_v": 16, "dtype": "bfloat16", "latent": True}, "latents"),
        ({"head_size": 32, "dtype": "int8"}, "pages are int8"),
    ],
)
def test_what_is_not_served_is_refused(sizes: dict, message: str):
    layout = AttentionPageLayout.fitting(**{"block_size": 4, "num_kv_heads": 1, "dtype": "float32"} | sizes)
    table = GroupTable(jnp.zeros((1, 1), jnp.int32), jnp.zeros(1, jnp.int32))
    settings = AttentionSettings(layout=layout, layer_slot=0, layer_slots=1)
    with pytest.raises(ValueError, match=message):
        choose_implementation(settings, table, "numba")
