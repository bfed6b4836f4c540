import dataclasses
from fractions import Fraction

import pytest

from jaxkv.errors import JaxkvError
from jaxkv.specs import (
    SPEC_KINDS,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLASpec,
    RequestLimits,
    ScratchSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    blocks_touched,
)
from tests.core.builders import full, local, mamba, window


def test_page_of_attention_is_tokens_times_heads_times_both_head_sizes_times_bytes() -> None:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=4, head_size=256, dtype="bfloat16")
    assert spec.page_size_bytes == 16 * 4 * (256 + 256) * 2
    assert dataclasses.replace(spec, head_size_v=128).page_size_bytes == 16 * 4 * (256 + 128) * 2
    assert dataclasses.replace(spec, num_head_slots=6).page_size_bytes == 16 * 6 * 512 * 2
    assert dataclasses.replace(spec, state_content_bytes=100).page_size_bytes == 16 * 4 * 100


def test_quantised_page_holds_its_scales() -> None:
    spec = full(16, dtype="int8", kv_quant_scale_bytes=8)
    assert spec.page_size_bytes == 16 * 1 * (8 + 8 + 8)


def test_states_may_cover_several_tokens_or_a_part_of_one() -> None:
    assert full(16, tokens_per_state=4).page_size_bytes == full(4).page_size_bytes
    assert full(16, tokens_per_state=Fraction(1, 4)).page_size_bytes == full(64).page_size_bytes
    with pytest.raises(JaxkvError, match=r"block_size 6 .* states of 4"):
        full(6, tokens_per_state=4)


def test_latent_cache_has_one_vector_a_token_and_rounds_its_page_up() -> None:
    assert MLASpec(block_size=16, head_size=576).page_size_bytes == 16 * 576 * 2
    aligned = MLASpec(block_size=16, head_size=576, alignment=1000)
    assert aligned.page_size_bytes == 19_000
    assert aligned.with_block_size(32).page_size_bytes == 37_000
    window_spec = SlidingWindowMLASpec(block_size=16, head_size=576, sliding_window=8, alignment=1000)
    assert window_spec.with_block_size(32).page_size_bytes == 37_000


def test_recurrent_page_is_the_sum_of_its_tensors_whatever_the_block() -> None:
    spec = MambaSpec(block_size=16, shapes=((8, 4), (3,)), dtypes=("float32", "bfloat16"))
    assert spec.page_size_bytes == 8 * 4 * 4 + 3 * 2
    assert spec.with_block_size(64).page_size_bytes == spec.page_size_bytes


def test_padding_raises_the_page_and_never_cuts_it() -> None:
    spec = full(16)
    assert spec.padded_to(spec.page_size_bytes + 100).page_size_bytes == spec.page_size_bytes + 100
    with pytest.raises(JaxkvError, match="smaller than the page's content of 512 bytes"):
        spec.padded_to(511)


@pytest.mark.parametrize("block_size", [1, 3, 4, 8])
@pytest.mark.parametrize("granularity", [1, 2, 4, 6])
def test_blocks_touched_is_the_worst_case_over_all_starts(block_size: int, granularity: int) -> None:
    for num_tokens in range(1, 30):
        starts = range(0, 12 * block_size, granularity)
        worst = max((s + num_tokens - 1) // block_size - s // block_size + 1 for s in starts)
        assert blocks_touched(num_tokens, block_size, granularity) == worst
    assert blocks_touched(0, block_size) == 0


def test_window_admission_bound_of_the_article_is_too_small() -> None:
    limits = RequestLimits(max_model_len=64, max_in_flight_tokens=7)
    assert window(8, 4).max_blocks_per_request(limits) == 5
    assert window(8, 4, num_lookahead_tokens=3).num_retained_tokens == 9


def test_window_never_costs_more_than_full_attention() -> None:
    limits = RequestLimits(max_model_len=64, max_in_flight_tokens=64)
    assert window(64, 1).max_blocks_per_request(limits) == full(1).max_blocks_per_request(limits) == 64


def test_local_bound_is_exact_where_the_chunk_is_not_a_multiple_of_the_block() -> None:
    limits = RequestLimits(max_model_len=1000, max_in_flight_tokens=3)
    # Chunks of 6 start at 0, 6, 12...: from token 6 on, 5 + 3 tokens lie in blocks 1, 2 and 3.
    assert local(6, 4).max_blocks_per_request(limits) == 3
    assert local(8, 4).max_blocks_per_request(limits) == 3


def test_recurrent_rings_and_encoders_hold_a_fixed_number() -> None:
    limits = RequestLimits(max_model_len=1000, max_in_flight_tokens=64, max_encoder_len=10)
    assert mamba().max_blocks_per_request(limits) == 2
    assert mamba(mamba_cache_mode="none", num_speculative_blocks=3).max_blocks_per_request(limits) == 4
    assert mamba(num_prefill_checkpoint_blocks=2).max_blocks_per_request(limits) == 4
    assert ScratchSpec(block_size=4, num_kv_heads=1, head_size=8).max_blocks_per_request(limits) == 1
    assert CrossAttentionSpec(block_size=4, num_kv_heads=1, head_size=8).max_blocks_per_request(limits) == 3


def test_context_parallelism_shares_tokens_of_sharded_layers_only() -> None:
    limits = RequestLimits(max_model_len=64, max_in_flight_tokens=8, decode_context_parallel_size=4)
    assert full(4).max_blocks_per_request(limits) == 4
    assert full(4, dcp_sharded=False).max_blocks_per_request(limits) == 16


def test_admission_bound_follows_the_length_of_the_request() -> None:
    limits = RequestLimits(max_model_len=1000, max_in_flight_tokens=8)
    assert [full(4).admission_blocks(n, limits) for n in (1, 4, 5, 2000)] == [1, 1, 2, 250]
    assert window(8, 4).admission_blocks(3, limits) == 1


def test_draft_layers_do_not_split_a_group() -> None:
    assert full(4, is_draft=True) == full(4)
    assert window(8) != window(9)


def test_every_kind_is_listed_under_its_name() -> None:
    assert all(issubclass(spec, KVCacheSpec) and spec.kind == kind for kind, spec in SPEC_KINDS.items())
    assert len(SPEC_KINDS) == 8


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: full(0), "block_size.*0"),
        (lambda: full(4, dtype="float7"), "float7"),
        (lambda: window(0), "sliding_window.*0"),
        (lambda: local(-1), "attention_chunk_size.*-1"),
        (lambda: MambaSpec(block_size=4, shapes=((2,),), dtypes=()), "1 shapes"),
        (lambda: MambaSpec(block_size=4, shapes=((0,),), dtypes=("float32",)), "0"),
        (lambda: mamba(mamba_cache_mode="all"), "'all'"),
        (lambda: RequestLimits(max_model_len=0, max_in_flight_tokens=1), "max_model_len.*0"),
        (
            lambda: ScratchSpec(block_size=4, num_kv_heads=1, head_size=8, prefix_cacheable=True),
            "prefix_cacheable",
        ),
        (lambda: FullAttentionSpec(block_size=4, num_kv_heads=True, head_size=8), "num_kv_heads.*True"),
    ],
)
def test_bad_fields_are_refused_by_name_and_value(make, named: str) -> None:
    with pytest.raises(JaxkvError, match=named):
        make()


def test_a_window_spec_keeps_its_kind_through_replacement() -> None:
    assert isinstance(window(8).with_block_size(8), SlidingWindowSpec)


def test_bytes_and_table_width_of_one_layer() -> None:
    limits = RequestLimits(max_model_len=100, max_in_flight_tokens=8)
    assert full(4).max_memory_bytes(limits) == 25 * (4 * (8 + 8) * 2)
    assert mamba(4).max_memory_bytes(limits) == 2 * (4 * 4)
    assert full(4).block_table_token_alignment == 128
    assert mamba(4).block_table_token_alignment is None
