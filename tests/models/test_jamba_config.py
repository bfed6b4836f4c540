"""Configurations of Jamba as they are published, and what is refused."""

import pytest

from jaxkv.specs import FullAttentionSpec, MambaSpec
from models.jamba import cache_specs
from models.jamba_config import JambaConfig
from tests.model_config.published import read

MINI, REASONING = read("jamba-1.5-mini"), read("jamba-reasoning-3b")


def test_one_layer_in_eight_attends_and_every_second_has_experts():
    config = JambaConfig.from_hf(MINI)
    assert [i for i, attends in enumerate(config.attends) if attends] == [4, 12, 20, 28]
    assert [i for i, chosen in enumerate(config.has_experts) if chosen] == list(range(1, 32, 2))
    assert (config.num_experts, config.experts_per_token) == (16, 2)
    assert (config.channels, config.state_size, config.conv_kernel, config.time_rank) == (8192, 16, 4, 256)
    assert not config.tied


def test_an_empty_file_means_the_class_defaults_which_the_first_jamba_has():
    assert JambaConfig.from_hf({}) == JambaConfig.from_hf(read("jamba-v0.1"))


def test_a_single_expert_is_a_dense_mlp_and_the_embedding_may_be_the_output_matrix():
    config = JambaConfig.from_hf(REASONING)
    assert not any(config.has_experts)
    assert [i for i, attends in enumerate(config.attends) if attends] == [7, 21]
    assert config.tied


def test_states_may_accumulate_in_another_dtype_than_the_models():
    specs = cache_specs(JambaConfig.from_hf(MINI), 16, "bfloat16", "float32")
    mamba, attention = specs["layers.0"], specs["layers.4"]
    assert isinstance(mamba, MambaSpec)
    assert isinstance(attention, FullAttentionSpec)
    assert (mamba.shapes, mamba.dtypes) == (((8192, 3), (8192, 16)), ("bfloat16", "float32"))
    assert (attention.num_kv_heads, attention.head_size, attention.dtype) == (8, 128, "bfloat16")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act in config.json must be 'silu'"),
        ({"mamba_proj_bias": True}, "mamba_proj_bias"),
        ({"mamba_conv_bias": False}, "mamba_conv_bias"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"attn_layer_offset": 8}, "attn_layer_offset in config.json must be less than attn_layer_period, 8"),
        ({"num_key_value_heads": 3}, "32 query heads cannot share 3"),
        ({"num_attention_heads": 24}, "hidden_size 4096 is no multiple of 24 heads"),
        ({"num_experts_per_tok": 17}, "num_experts_per_tok 17 is more than num_experts 16"),
        ({"mamba_d_conv": 1}, "an integer of at least 2, not 1"),
        ({"mamba_dt_rank": "all"}, "mamba_dt_rank in config.json must be an integer"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        JambaConfig.from_hf(MINI | changes)
