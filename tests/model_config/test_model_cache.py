"""Layer patterns and bytes of published models; the counts and bytes are those of their model cards."""

from collections import Counter
from typing import Any

import pytest

from jaxkv.errors import JaxkvError
from jaxkv.model_config.model_cache import model_cache_from_config

GEMMA3_270M = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "max_position_embeddings": 32768,
}

PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, int], int, int]] = {
    # name: (config, layers by kind, bytes a token of the full layers, bytes of full windows), bfloat16
    "gemma-3-270m": (GEMMA3_270M, {"sliding_window": 15, "full": 3}, 3072, 7_864_320),
    "gemma-3-4b": (
        {
            "model_type": "gemma3",
            "text_config": {"num_hidden_layers": 34, "sliding_window": 1024, "hidden_size": 2560},
        },
        {"sliding_window": 29, "full": 5},
        20_480,
        121_634_816,
    ),
    "gemma-2-2b": (
        {
            "architectures": ["Gemma2ForCausalLM"],
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "sliding_window": 4096,
        },
        {"sliding_window": 13, "full": 13},
        53_248,
        218_103_808,
    ),
    "mistral-7b-v0.1": (
        {
            "model_type": "mistral",
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "hidden_size": 4096,
            "sliding_window": 4096,
        },
        {"sliding_window": 32},
        0,
        536_870_912,
    ),
    "gpt-oss-20b": (
        {
            "model_type": "gpt_oss",
            "layer_types": ["sliding_attention", "full_attention"] * 12,
            "num_hidden_layers": 24,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "sliding_window": 128,
        },
        {"sliding_window": 12, "full": 12},
        24_576,
        3_145_728,
    ),
    "exaone-4.0-32b": (
        {
            "model_type": "exaone4",
            "num_hidden_layers": 64,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "sliding_window": 4096,
            "sliding_window_pattern": "LLLG",
        },
        {"sliding_window": 48, "full": 16},
        65_536,
        805_306_368,
    ),
    "llama-4-scout": (
        {
            "architectures": ["Llama4ForConditionalGeneration"],
            "text_config": {
                "num_hidden_layers": 48,
                "num_attention_heads": 40,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "attention_chunk_size": 8192,
            },
        },
        {"chunked_local": 36, "full": 12},
        49_152,
        1_207_959_552,
    ),
    "llama-2-7b": (
        {"model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096},
        {"full": 32},
        524_288,
        0,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models(name: str) -> None:
    config, kinds, bytes_per_token, window_bytes = PUBLISHED[name]
    specs = model_cache_from_config(config, name).specs(block_size=16)
    assert Counter(spec.kind for spec in specs.values()) == kinds
    assert list(specs) == [f"layers.{i}" for i in range(len(specs))]
    growing = [spec for spec in specs.values() if spec.kind == "full"]
    local = [spec for spec in specs.values() if spec.kind != "full"]
    assert sum(spec.page_size_bytes // 16 for spec in growing) == bytes_per_token
    reach = [
        getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", 0) for spec in local
    ]
    pages = [spec.page_size_bytes // 16 for spec in local]
    assert sum(page * tokens for page, tokens in zip(pages, reach, strict=True)) == window_bytes


def full_layers(config: dict[str, Any]) -> list[int]:
    specs = model_cache_from_config(config).specs(16)
    return [i for i in range(len(specs)) if specs[f"layers.{i}"].kind == "full"]


def test_gemma_3_is_full_on_every_sixth_layer_however_it_is_spelled() -> None:
    silent = {key: value for key, value in GEMMA3_270M.items() if key != "sliding_window_pattern"}
    types = ["full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(18)]
    spellings = [
        GEMMA3_270M,
        silent,
        silent | {"_sliding_window_pattern": 6},
        silent | {"layer_types": types},
    ]
    assert [full_layers(config) for config in spellings] == [[5, 11, 17]] * 4


def test_upper_layers_of_qwen_slide_only_where_asked_to() -> None:
    config = {
        "model_type": "qwen2",
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "hidden_size": 64,
        "sliding_window": 32,
        "max_window_layers": 4,
        "use_sliding_window": False,
    }
    assert full_layers(config) == [0, 1, 2, 3, 4, 5]
    assert full_layers(config | {"use_sliding_window": True}) == [0, 1, 2, 3]


def test_a_mistral_without_window_is_full() -> None:
    config = {"model_type": "mistral", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    assert full_layers(config | {"sliding_window": None}) == [0, 1]


def test_dtype_of_the_config_is_the_default() -> None:
    cache = model_cache_from_config(GEMMA3_270M | {"torch_dtype": "float32"})
    assert cache.cache_dtype() == "float32"
    assert cache.cache_dtype("int8") == "int8"
    assert model_cache_from_config(GEMMA3_270M).cache_dtype() == "bfloat16"


def test_unknown_architectures_are_refused_with_what_was_looked_for() -> None:
    with pytest.raises(JaxkvError) as error:
        model_cache_from_config({"architectures": ["FooForCausalLM"], "num_hidden_layers": 2})
    for part in ("model_type", "architectures", "FooForCausalLM", "gemma3_text"):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": None}, "none of the keys num_hidden_layers"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ({"num_hidden_layers": 10**9}, "more than 10000"),
        ({"num_key_value_heads": "1"}, "num_key_value_heads = '1'"),
        ({"head_dim": -256}, "head_dim = -256"),
        ({"sliding_window": None}, "none of the keys sliding_window"),
        ({"sliding_window_pattern": "LXG"}, "letters L and G, got 'LXG'"),
        ({"layer_types": ["full_attention"] * 17}, "layer_types has 17 entries, num_hidden_layers is 18"),
        ({"layer_types": ["mamba"] * 18}, "recurrent layers, which this model_type has none of"),
        ({"layer_types": "full"}, "layer_types must be a list"),
        (
            {"head_dim": None, "hidden_size": 642},
            "hidden_size 642 is not a multiple of num_attention_heads 4",
        ),
    ],
)
def test_contradictory_or_missing_keys_are_named(change: dict[str, Any], message: str) -> None:
    config = {"model_type": "gemma2"} | {key: GEMMA3_270M[key] for key in GEMMA3_270M if key != "model_type"}
    with pytest.raises(JaxkvError, match=message):
        model_cache_from_config(config | change)


def test_a_period_whose_attention_layer_lies_outside_is_refused() -> None:
    jamba = {"model_type": "jamba", "num_hidden_layers": 8, "attn_layer_period": 8, "attn_layer_offset": 8}
    with pytest.raises(JaxkvError, match="attn_layer_offset 8 is not below attn_layer_period 8"):
        model_cache_from_config(jamba)


def test_unknown_dtypes_and_block_sizes_are_refused() -> None:
    cache = model_cache_from_config(GEMMA3_270M)
    with pytest.raises(JaxkvError, match="unknown dtype 'float5'"):
        cache.specs(16, "float5")
    with pytest.raises(JaxkvError, match=r"block_size must be .* 0"):
        cache.specs(0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 KV heads"),
        ({"num_key_value_heads": 8}, "4 attention heads cannot share 8 KV heads"),
        ({"torch_dtype": "bfloat61"}, "dtype 'bfloat61' is none of float32, bfloat16, float16"),
        ({"dtype": 16}, "dtype 16 is none of"),
        ({"mamba_ssm_dtype": 32}, "mamba_ssm_dtype must be the name of a dtype, not 32"),
    ],
)
def test_configs_that_no_model_can_have_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(JaxkvError, match=message):
        model_cache_from_config({**GEMMA3_270M, **change}, "odd")


@pytest.mark.parametrize(
    ("named", "dtype"), [("float16", "float16"), ("torch.float32", "float32"), ("auto", None), (None, None)]
)
def test_the_dtype_of_the_config_is_read(named: str | None, dtype: str | None) -> None:
    assert model_cache_from_config({**GEMMA3_270M, "torch_dtype": named}, "x").dtype == dtype
