import pytest

from jaxkv.errors import JaxkvError
from jaxkv.planning import PlanConfig, make_plan
from jaxkv.planning.hybrid_blocks import align_hybrid_blocks
from jaxkv.planning.pages import equal_pages
from jaxkv.specs import FullAttentionSpec, MambaSpec, MLASpec
from tests.planning.layers import PAGE, full, layers, mamba, mla, window


def test_a_dividing_page_gets_a_larger_block() -> None:
    equal = equal_pages({"a": full(), "b": window(heads=6)})
    assert equal["a"].block_size == 48
    assert equal["a"].page_size_bytes == equal["b"].page_size_bytes == 3 * PAGE


def test_a_page_that_does_not_divide_and_a_state_are_padded() -> None:
    equal = equal_pages({"a": full(), "b": window(heads=3), "c": mamba(100)})
    assert equal["a"].page_size_padded == 3 * PAGE // 2
    assert equal["a"].block_size == 16
    assert equal["c"].page_size_bytes == 3 * PAGE // 2


def test_latent_pages_are_not_padded() -> None:
    with pytest.raises(JaxkvError, match=r"layer mla\.0: its page of 18432 bytes .* 24576 bytes"):
        equal_pages(layers((1, "mla", mla()), (1, "full", full(heads=6))))


@pytest.mark.parametrize(
    ("state_bytes", "per_token", "block"),
    [
        (311_296, 4096, 80),  # jamba v0.1: 8 heads of 128
        (2_146_304, 2048, 1056),  # 16-token steps over 2,048 bytes a token
        (1000, 512, 16),  # the page covers the state already
    ],
)
def test_attention_blocks_grow_to_cover_a_state(state_bytes: int, per_token: int, block: int) -> None:
    attention = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=per_token // 4)
    aligned, notes = align_hybrid_blocks({"a": attention, "m": mamba(state_bytes)})
    assert {spec.block_size for spec in aligned.values()} == {block}
    assert bool(notes) == (block > 16)


def test_latent_blocks_grow_in_steps_of_128_tokens() -> None:
    # Kimi-K3: 449,372,160 bytes of state over 69 layers beside MLA of 576 elements.
    aligned, _ = align_hybrid_blocks(
        {"a": MLASpec(block_size=16, head_size=576), "m": mamba(449_372_160 // 69)}
    )
    assert aligned["a"].block_size == 5760


def test_states_without_checkpoints_keep_their_block() -> None:
    aligned, _ = align_hybrid_blocks({"a": full(), "m": mamba(100 * PAGE, block_size=1024, mode="none")})
    assert aligned["a"].block_size == 1600
    assert aligned["m"].block_size == 1024


def test_pages_are_raised_to_the_alignment() -> None:
    odd = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=96)
    plan = make_plan(layers((2, "layer", odd)), PlanConfig(policy="unified", max_model_len=64), 2**24)
    assert plan.page_size_bytes == 8192  # content of 6,144 bytes, tiles of 4,096
    assert plan.groups[0].spec.unpadded_page_size_bytes == 6144
    assert plan.bytes_per_block == 2 * 8192


def test_a_hybrid_plan_pads_states_to_the_grown_attention_page() -> None:
    config = PlanConfig(
        policy="unified", max_model_len=4096, page_alignment_bytes=1, align_hybrid_blocks=True
    )
    plan = make_plan(layers((2, "full", full()), (4, "mamba", mamba(3 * PAGE + 5))), config, 2**26)
    assert {group.block_size for group in plan.groups} == {64}
    assert plan.page_size_bytes == 4 * PAGE
    assert isinstance(plan.groups[-1].spec, MambaSpec)
    assert plan.hash_block_size == plan.scheduler_block_size == 64
