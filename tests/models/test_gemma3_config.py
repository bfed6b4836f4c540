"""Configurations as they are found in the wild, and what is refused."""

import pytest

from models.gemma3 import cache_specs
from models.gemma3_config import Gemma3Config
from models.sizes import AttentionSizes

SMALL = {
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "sliding_window": 512,
    "vocab_size": 262144,
    "max_position_embeddings": 32768,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}
LARGE_TEXT = {
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 34,
    "sliding_window": 1024,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
}
GGUF = {
    "gemma3.block_count": 18,
    "gemma3.embedding_length": 640,
    "gemma3.feed_forward_length": 2048,
    "gemma3.attention.head_count": 4,
    "gemma3.attention.head_count_kv": 1,
    "gemma3.attention.key_length": 256,
    "gemma3.attention.value_length": 256,
    "gemma3.attention.sliding_window": 512,
    "gemma3.context_length": 32768,
    "gemma3.rope.freq_base": 1e6,
    "gemma3.attention.layer_norm_rms_epsilon": 1e-6,
    "gemma3.vocab_size": 262144,
}


def full_layers(config: Gemma3Config) -> list[int]:
    return [i for i, sliding in enumerate(config.is_sliding) if not sliding]


@pytest.mark.parametrize("key", ["sliding_window_pattern", "_sliding_window_pattern"])
def test_pattern_by_either_name(key):
    config = Gemma3Config.from_hf({**SMALL, key: 6})
    assert full_layers(config) == [5, 11, 17]
    assert full_layers(Gemma3Config.from_hf({**SMALL, key: 9})) == [8, 17]


def test_layer_types_win_over_the_pattern():
    types = ["full_attention", *["sliding_attention"] * 17]
    config = Gemma3Config.from_hf({**SMALL, "layer_types": types, "sliding_window_pattern": 6})
    assert full_layers(config) == [0]


def test_gguf_and_config_json_of_the_same_model_agree():
    assert Gemma3Config.from_gguf(GGUF) == Gemma3Config.from_hf(SMALL)


def test_text_part_of_a_multimodal_config_with_class_defaults():
    config = Gemma3Config.from_hf(
        {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": LARGE_TEXT}
    )
    assert config.attention == AttentionSizes(num_heads=8, num_kv_heads=4, head_size=256)
    assert config.vocab_size == 262208
    assert config.rope_scaling_factor == 8.0
    assert full_layers(config) == [5, 11, 17, 23, 29]


def test_rope_as_newer_files_write_it():
    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 20_000.0},
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500_000.0},
    }
    config = Gemma3Config.from_hf(
        {**SMALL, "rope_theta": None, "rope_local_base_freq": None, "rope_parameters": rope}
    )
    assert (config.rope_local_theta, config.rope_theta, config.rope_scaling_factor) == (
        20_000.0,
        500_000.0,
        4.0,
    )


def test_gguf_of_27b_has_its_own_query_scale():
    config = Gemma3Config.from_gguf(
        {**GGUF, "gemma3.block_count": 62, "gemma3.embedding_length": 5376, "gemma3.attention.head_count": 32}
    )
    assert config.query_pre_attn_scalar == 168


def test_cache_specs_follow_the_layer_types():
    specs = cache_specs(Gemma3Config.from_hf(SMALL), 16, "bfloat16", "float32")
    assert [name for name, spec in specs.items() if spec.kind == "full"] == [
        "layers.5",
        "layers.11",
        "layers.17",
    ]
    assert {spec.page_size_bytes for spec in specs.values()} == {16 * 1 * (256 + 256) * 2}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "lacks hidden_size"),
        (
            {"num_hidden_layers": 0},
            "num_hidden_layers in config.json must be an integer of at least 1, not 0",
        ),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "4 query heads cannot share 3"),
        ({"head_dim": 255}, "head size 255 is odd"),
        ({"layer_types": ["full_attention"]}, "layer_types in config.json must be a list of 18"),
        ({"layer_types": ["mamba"] * 18}, "layer_types"),
        ({"sliding_window": "512"}, "sliding_window in config.json must be an integer"),
        ({"rms_norm_eps": -1}, "rms_norm_eps in config.json must be a positive number, not -1"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, "'default' or 'linear', not 'yarn'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "lacks factor"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings in config.json must be True, not False"),
        ({"attention_bias": True}, "attention_bias"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"hidden_activation": "silu"}, "hidden_activation"),
    ],
)
def test_refusals_name_the_field_and_the_value(change, message):
    with pytest.raises(ValueError, match=message):
        Gemma3Config.from_hf({**SMALL, **change})


SIZES = [
    key for key in GGUF if key.endswith(("count", "head_count_kv", "key_length", "context_length", "window"))
]


@pytest.mark.parametrize("key", SIZES)
def test_gguf_without_a_size_is_refused(key):
    with pytest.raises(ValueError, match=f"lacks {key}"):
        Gemma3Config.from_gguf({name: value for name, value in GGUF.items() if name != key})


def test_gguf_with_other_values_than_keys_is_refused():
    with pytest.raises(
        ValueError, match=r"gemma3.attention.value_length .* must be 256, the key length, not 128"
    ):
        Gemma3Config.from_gguf({**GGUF, "gemma3.attention.value_length": 128})
