"""What attention has to move, by hand: K and V once for each tile, q and results, new tokens."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.engine.serving import load_script

SCRIPTS = Path(__file__).parents[2] / "scripts"
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(SCRIPTS)  # scripts import one another by name
    script = load_script("needed_bytes")
Case, needed_bytes = script.Case, script.needed_bytes
CASE = Case(kernel="attention", block_size=16, kv_heads=2, head_size=128, q_heads=8, sequences=3, context=100)
Q_AND_RESULTS = 3 * 8 * (128 + 128) * 2  # bfloat16


def test_a_decode_moves_every_token_it_sees_once():
    token = 2 * (128 + 128) * 2
    assert needed_bytes(CASE) == 3 * 100 * token + Q_AND_RESULTS
    assert needed_bytes(replace(CASE, window=40)) == 3 * 40 * token + Q_AND_RESULTS
    assert needed_bytes(replace(CASE, window=400)) == needed_bytes(CASE)
    # Position 99 is the fourth of the chunk that begins at 96.
    assert needed_bytes(replace(CASE, chunk=32)) == 3 * 4 * token + Q_AND_RESULTS


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
def test_numbers_of_8_bits_have_a_scale_for_k_and_one_for_v(dtype):
    assert needed_bytes(replace(CASE, dtype=dtype)) == 3 * 100 * 2 * (128 + 128 + 8) + Q_AND_RESULTS


def test_a_latent_is_moved_once_and_results_have_the_size_of_v():
    latent = replace(CASE, kv_heads=1, head_size=576, head_size_v=512, latent=True)
    assert needed_bytes(latent) == 3 * 100 * 576 * 2 + 3 * 8 * (576 + 512) * 2


def test_new_tokens_are_read_and_written():
    written = needed_bytes(replace(CASE, writes=True)) - needed_bytes(CASE)
    assert written == 3 * 2 * (2 * (128 + 128) * 2)


def test_every_tile_of_a_prefill_reads_what_its_queries_see():
    chunk = replace(CASE, sequences=1, new=40, window=20)  # queries 60 .. 99 see 41 .. 99
    token, both = 2 * (128 + 128) * 2, 40 * 8 * (128 + 128) * 2
    assert needed_bytes(chunk) == 59 * token + both
    # Queries 60 .. 83 see 41 .. 83, queries 84 .. 99 see 65 .. 99.
    assert (
        needed_bytes(chunk, SimpleNamespace(position=[60, 84], num_queries=[24, 16]))
        == (43 + 35) * token + both
    )
