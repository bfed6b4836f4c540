"""Configurations of models with recurrent layers as they are found in the wild, and what is refused."""

from typing import Any

import pytest

from models.lara_mini import cache_specs as lara_mini_specs
from models.lara_mini_config import LaraMiniConfig
from models.lfm3_config import Lfm3Config
from models.qwen3_next_config import Qwen3NextConfig
from models.rope_config import RopeConfig
from models.sizes import ExpertSizes
from tests.model_config.published import read

QWEN3_NEXT, LARA_MINI, LFM3 = read("qwen3-next-80b-a3b"), read("lara-4-mini"), read("lfm3-1.7b")


def test_qwen3_next_interval_and_layer_types_say_the_same():
    config = Qwen3NextConfig.from_hf(QWEN3_NEXT)
    assert [i for i, attends in enumerate(config.attends) if attends] == list(range(3, 48, 4))
    types = ["full_attention" if attends else "linear_attention" for attends in config.attends]
    stated = {key: value for key, value in QWEN3_NEXT.items() if key != "full_attention_interval"}
    assert Qwen3NextConfig.from_hf(stated | {"layer_types": types}) == config


def test_qwen3_next_experts_are_where_step_and_list_put_them():
    assert all(Qwen3NextConfig.from_hf(QWEN3_NEXT).has_experts)
    config = Qwen3NextConfig.from_hf(QWEN3_NEXT | {"decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert [i for i, experts in enumerate(config.has_experts) if experts] == [1, *range(5, 48, 2)]
    assert config.experts == ExpertSizes(
        num_experts=512, experts_per_token=10, inner_size=512, shared_size=512, renormalise=True
    )


def test_rope_as_older_and_newer_files_write_it():
    config = Qwen3NextConfig.from_hf(QWEN3_NEXT)
    assert (config.rope, config.turning) == (RopeConfig(1e7, 0.25), 64)
    newer = {key: value for key, value in QWEN3_NEXT.items() if "rope" not in key and "rotary" not in key}
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    assert Qwen3NextConfig.from_hf(newer | {"rope_parameters": rope}) == config


@pytest.mark.parametrize(("kind", "published"), [(LaraMiniConfig, LARA_MINI), (Lfm3Config, LFM3)])
def test_an_empty_file_means_the_class_defaults_that_the_published_file_states(kind, published):
    assert kind.from_hf({}) == kind.from_hf(published)


def test_kinds_of_lara_mini_follow_the_layer_types():
    specs = lara_mini_specs(LaraMiniConfig.from_hf(LARA_MINI), 16, "bfloat16", "float32")
    kinds = {"linear_attention": "mamba", "sliding_attention": "sliding_window", "full_attention": "full"}
    assert [spec.kind for spec in specs.values()] == [kinds[word] for word in LARA_MINI["layer_types"]]


REFUSED: list[tuple[Any, dict[str, Any], dict[str, Any], str]] = [
    (Qwen3NextConfig, QWEN3_NEXT, {"hidden_act": "gelu"}, "hidden_act in config.json must be 'silu'"),
    (Qwen3NextConfig, QWEN3_NEXT, {"attention_bias": True}, "attention_bias"),
    (Qwen3NextConfig, QWEN3_NEXT, {"num_key_value_heads": 3}, "16 query heads cannot share 3"),
    (Qwen3NextConfig, QWEN3_NEXT, {"linear_num_key_heads": 5}, "32 value heads cannot share 5"),
    (Qwen3NextConfig, QWEN3_NEXT, {"linear_conv_kernel_dim": 1}, "an integer of at least 2, not 1"),
    (Qwen3NextConfig, QWEN3_NEXT, {"num_experts": 4}, "num_experts_per_tok 10 is more than num_experts 4"),
    (Qwen3NextConfig, QWEN3_NEXT, {"norm_topk_prob": "yes"}, "norm_topk_prob .* must be True or False"),
    (Qwen3NextConfig, QWEN3_NEXT, {"mlp_only_layers": [48]}, "mlp_only_layers .* a list of layers of 48"),
    (Qwen3NextConfig, QWEN3_NEXT, {"partial_rotary_factor": 1.5}, "at most 1, not 1.5"),
    (Qwen3NextConfig, QWEN3_NEXT, {"partial_rotary_factor": 0.001}, "0 that turn"),
    (Qwen3NextConfig, QWEN3_NEXT, {"rope_scaling": {"rope_type": "yarn"}}, "must be 'default', not 'yarn'"),
    (
        Qwen3NextConfig,
        QWEN3_NEXT,
        {"layer_types": ["mamba"] * 48},
        "layer_types in config.json must be a list",
    ),
    (LaraMiniConfig, LARA_MINI, {"layer_types": ["full_attention"]}, "a list of 34 of"),
    (LaraMiniConfig, LARA_MINI, {"head_dim": 127}, "head size 127 is odd"),
    (LaraMiniConfig, LARA_MINI, {"partial_rotary_factor": 0.5}, "must be 1.0, not 0.5"),
    (LaraMiniConfig, LARA_MINI, {"sliding_window": 0}, "sliding_window"),
    (Lfm3Config, LFM3, {"conv_bias": True}, "conv_bias in config.json must be False, not True"),
    (Lfm3Config, LFM3, {"conv_L_cache": 1}, "conv_L_cache .* at least 2"),
    (Lfm3Config, LFM3, {"use_sandwich_norm": 1.5}, "use_sandwich_norm"),
    (Lfm3Config, LFM3, {"layer_types": ["linear_attention"] * 24}, "layer_types"),
    (Lfm3Config, LFM3, {"rope_parameters": {"rope_theta": 1e4}}, "sliding_attention .* lacks rope_theta"),
]


@pytest.mark.parametrize(("kind", "published", "change", "message"), REFUSED)
def test_refusals_name_the_field_and_the_value(kind, published, change, message):
    with pytest.raises(ValueError, match=message):
        kind.from_hf(published | change)
