import numpy as np
import pytest

from jaxkv.block_tables import BlockTable, StateTable, padded_tables
from jaxkv.errors import JaxkvError
from jaxkv.specs import ScratchSpec
from tests.core.builders import Driver, full, make_cache, mamba, seq, window


def test_tables_are_compact_padded_with_the_null_block_and_in_the_order_of_groups() -> None:
    cache = make_cache([window(8), full(), window(8)])
    driver = Driver(cache)
    requests = [driver.request(seq(n, 60)) for n in (1, 2)]
    for request, tokens in zip(requests, (30, 6), strict=True):
        driver.step(request, tokens)
        driver.step(request, 2)
    rows = np.array([cache.row_of(r.request_id) for r in requests])
    tables = padded_tables(cache, rows, np.array([30, 6]), num_seqs=4, widths=[6, 10, 6])
    for group, table in enumerate(tables):
        assert isinstance(table, BlockTable)
        assert table.block_ids.shape == (4, [6, 10, 6][group])
        for row, request in enumerate(requests):
            first = int(table.first_block[row])
            held = [0] * first + table.block_ids[row][table.block_ids[row] > 0].tolist()
            assert held == cache.get_block_ids(request.request_id)[group]
        assert not table.block_ids[2:].any()
    assert [int(t.first_block[0]) for t in tables if isinstance(t, BlockTable)] == [5, 0, 5]


def test_states_are_listed_to_read_and_to_write() -> None:
    cache = make_cache([full(), mamba(), mamba()], blocks_per_state=2)
    driver = Driver(cache)
    first, second = driver.request(seq(1, 20)), driver.request(seq(2, 20))
    driver.step(first, 8)
    driver.step(first, 3)
    driver.step(second, 5)
    tables = padded_tables(cache, np.array([0, 1]), np.array([8, 0]), num_seqs=3, widths=[8, 0, 0])
    states = [table for table in tables if isinstance(table, StateTable)]
    assert [table.read.shape for table in states] == [(3, 2)] * 2
    assert all((table.read[0] > 0).all() and (table.write[:2] > 0).all() for table in states)
    assert not any(table.read[1:].any() or table.write[2].any() for table in states)
    assert not set(states[0].read[0].tolist()) & set(states[0].write[0].tolist())
    ids = [table.write[0].tolist() for table in states] + [table.write[1].tolist() for table in states]
    assert len({block for some in ids for block in some}) == 8


def test_states_left_inside_a_chunk_are_listed_with_their_positions() -> None:
    cache = make_cache(
        [full(), mamba(num_prefill_checkpoint_blocks=2)],
        blocks_per_state=2,
        options={"retention_interval": 4},
    )
    driver = Driver(cache)
    first, second = driver.request(seq(1, 30)), driver.request(seq(2, 30))
    driver.step(first, 3)
    driver.step(first, 12)
    driver.step(second, 5)
    rows, computed = np.array([0, 1]), np.array([3, 0])
    [_, table] = padded_tables(cache, rows, computed, num_seqs=3, widths=[8, 2])
    assert isinstance(table, StateTable)
    # Of 4, 8 and 12, inside (3, 15), the last two; 4, inside (0, 5); nothing in a padding row.
    assert table.checkpoint_lens.tolist() == [[8, 12], [4, 0], [0, 0]]
    assert ((table.checkpoint > 0).all(axis=2) == (table.checkpoint_lens > 0)).all()
    blocks = [*table.checkpoint[table.checkpoint > 0].tolist(), *table.write[:2].ravel().tolist()]
    assert len(set(blocks)) == len(blocks) == 10
    with pytest.raises(JaxkvError, match="leaves 2 states of group 1 inside a chunk, its table has 1"):
        padded_tables(cache, rows, computed, num_seqs=3, widths=[8, 1])
    driver.step(first, 1)
    [_, table] = padded_tables(cache, rows[:1], np.array([15]), num_seqs=1, widths=[8, 2])
    assert isinstance(table, StateTable)
    assert not table.checkpoint_lens.any()


def test_rings_have_tables_too() -> None:
    ring = ScratchSpec(block_size=4, num_kv_heads=1, head_size=8)
    driver = Driver(make_cache([full(), ring]))
    request = driver.run(seq(1, 9))
    table = padded_tables(driver.cache, np.array([0]), np.array([9]), num_seqs=1, widths=[4, 1])[1]
    assert isinstance(table, BlockTable)
    assert table.block_ids.tolist() == [driver.cache.get_block_ids(request.request_id)[1]]


def test_a_table_that_is_too_narrow_is_refused() -> None:
    driver = Driver(make_cache([full()]))
    driver.run(seq(1, 20))
    rows, computed = np.array([0]), np.array([20])
    with pytest.raises(JaxkvError, match="group 0 holds 5 blocks, its table has 4"):
        padded_tables(driver.cache, rows, computed, num_seqs=1, widths=[4])
    with pytest.raises(JaxkvError, match="1 rows do not fit into 0"):
        padded_tables(driver.cache, rows, computed, num_seqs=0, widths=[8])
    with pytest.raises(JaxkvError, match="1 groups need as many table widths, not 2"):
        padded_tables(driver.cache, rows, computed, num_seqs=1, widths=[8, 8])
