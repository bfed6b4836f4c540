"""Every configuration of the folder is read, or refused with the reason."""

from collections import Counter

import pytest

from jaxkv.errors import JaxkvError
from jaxkv.model_config.model_cache import model_cache_from_config
from jaxkv.specs import AttentionSpec, MambaSpec
from tests.model_config.published import CONFIGS, NOT_MODELLED, PUBLISHED, Row, read


def test_the_table_names_every_file() -> None:
    names = {path.stem for path in CONFIGS.glob("*.json")}
    assert names == set(PUBLISHED) | set(NOT_MODELLED)
    assert len(names) == 70


def measured(name: str) -> Row:
    cache = model_cache_from_config(read(name), name)
    specs = cache.specs(16, "bfloat16", state_dtype="bfloat16")
    own = sum(s.page_size_bytes for s in cache.specs(16).values() if isinstance(s, MambaSpec))
    counts: Counter[str] = Counter()
    kv = state = window = 0
    for spec in specs.values():
        reach = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
        if isinstance(spec, MambaSpec):
            counts["state"] += 1
            state += spec.page_size_bytes
        elif reach is None:
            counts[spec.kind] += 1
            kv += spec.page_size_bytes // 16
        else:
            counts[f"{'swa' if spec.kind == 'sliding_window' else 'chunk'}{reach}"] += 1
            window += spec.page_size_bytes // 16 * reach
    caches = " + ".join(f"{count} {kind}" for kind, count in counts.items())
    return Row(caches, kv, state, window, None if own == state else own)


@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_and_bytes_of(name: str) -> None:
    got, wanted = measured(name), PUBLISHED[name]
    assert sorted(got.caches.split(" + ")) == sorted(wanted.caches.split(" + "))
    assert got[1:] == wanted[1:]


@pytest.mark.parametrize("name", NOT_MODELLED)
def test_kinds_that_are_not_modelled_are_refused_with_the_reason(name: str) -> None:
    with pytest.raises(JaxkvError, match=NOT_MODELLED[name]):
        model_cache_from_config(read(name), name)


def test_layers_with_two_caches_and_layers_with_none() -> None:
    both = model_cache_from_config(read("falcon-h1-tiny-90m")).specs(16)
    assert list(both)[:2] == ["layers.0.attention", "layers.0.state"]
    zamba = model_cache_from_config(read("zamba2-2.7b")).specs(16)
    assert list(zamba)[5:9] == ["layers.5", "layers.6.attention", "layers.6.state", "layers.7"]
    baichuan = model_cache_from_config(read("baichuan-m1-14b")).specs(16)
    assert baichuan["layers.1.attention"].kind == "sliding_window"
    assert baichuan["layers.1.state"].page_size_bytes == 8 * 128 * 2 * 2
    shared = model_cache_from_config(read("gemma-3n-e2b"))
    assert len(shared.layers) == 30
    assert list(shared.specs(16))[-1] == "layers.19"
    indexed = model_cache_from_config(read("glm-5.2")).specs(16)
    assert "layers.0.indexer" in indexed
    assert "layers.3" in indexed  # shares the indexer of an earlier layer


def test_one_based_layer_numbers() -> None:
    kinds = [spec.kind for spec in model_cache_from_config(read("kimi-linear-48b-a3b")).specs(16).values()]
    assert [i for i, kind in enumerate(kinds) if kind == "mla"] == [3, 7, 11, 15, 19, 23, 26]


def test_keys_and_values_of_8_bits_have_the_scales_of_vllm_per_token_and_head() -> None:
    """vLLM 0.33, `TritonAttentionBackend`: of a token and head its elements and two float32."""
    cache = model_cache_from_config(read("gemma-3-270m"))
    pages = {dtype: cache.specs(16, dtype)["layers.0"].page_size_bytes for dtype in ("bf16", "fp8", "int8")}
    assert pages == {"bf16": 16384, "fp8": 8192 + 16 * 8, "int8": 8192 + 16 * 8}


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_latents_of_8_bits_have_the_pair_of_scales_of_vllm(dtype: str) -> None:
    """vLLM 0.33, `MLACommonBackend`: `head_size * 1 + 2 * 4` bytes a token for every per-token-head mode."""
    spec = next(s for s in model_cache_from_config(read("deepseek-v3")).specs(16, dtype).values())
    assert spec.page_size_bytes == 16 * (576 + 2 * 4)


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3", "fp8_per_token_head", "int8", "int8_per_token_head"])
def test_the_dtype_of_keys_and_values_leaves_states_alone(name: str) -> None:
    cache = model_cache_from_config(read("jamba-1.5-mini"))
    usual, smaller = cache.specs(16), cache.specs(16, kv_cache_dtype=name)
    for layer, spec in usual.items():
        if spec.kind == "mamba":
            assert smaller[layer] == spec
        else:
            assert smaller[layer].page_size_bytes == 16 * 8 * (2 * 128 + 8)


def test_an_unknown_dtype_of_keys_and_values_is_refused() -> None:
    with pytest.raises(JaxkvError, match=r"kv_cache_dtype must be one of auto, bfloat16, .*, not 'fp4'"):
        model_cache_from_config(read("gemma-3-270m")).specs(16, kv_cache_dtype="fp4")


@pytest.mark.parametrize("name", ["qwen3.5-27b", "nemotron-nano-9b-v2", "gpt-oss-20b", "kimi-linear-48b-a3b"])
def test_two_chips_hold_half_of_what_has_heads(name: str) -> None:
    cache = model_cache_from_config(read(name))
    one, two = cache.specs(16), cache.specs(16, tensor_parallel=2)
    for layer, spec in one.items():
        share = 1 if spec.kind == "mla" else 2
        assert two[layer].unpadded_page_size_bytes == spec.unpadded_page_size_bytes // share
    notes = cache.replication(2)
    assert bool(notes) == (name == "kimi-linear-48b-a3b")


def test_kv_heads_are_replicated_where_there_are_fewer_than_chips() -> None:
    cache = model_cache_from_config(read("gemma-3-1b"))
    spec = cache.specs(16, tensor_parallel=4)["layers.0"]
    assert isinstance(spec, AttentionSpec)
    assert spec.num_kv_heads == 1
    assert cache.replication(4) == ("1 KV heads on 4 chips: each is replicated on 4",)


@pytest.mark.parametrize(
    ("name", "tensor_parallel", "message"),
    [
        ("gemma-3-270m", 3, r"does not divide 4 heads; choose one of 1, 2, 4"),
        (
            "phi-4-mini-flash",
            8,
            r"neither divides 20 KV heads .* nor be replicated .* choose one of 1, 2, 4, 5",
        ),
        ("qwen3.5-27b", 5, r"tensor_parallel 5 does not divide"),
        ("gemma-3-270m", 0, r"tensor_parallel must be an integer of at least 1, not 0"),
        ("gemma-3-270m", -2, r"not -2"),
    ],
)
def test_chips_that_cannot_share_heads_are_refused(name: str, tensor_parallel: int, message: str) -> None:
    with pytest.raises(JaxkvError, match=message):
        model_cache_from_config(read(name)).specs(16, tensor_parallel=tensor_parallel)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("bamba-9b", {"attn_layer_indices": [9, 40]}, r"names layer 40; .* num_hidden_layers is 32"),
        ("bamba-9b", {"attn_layer_indices": [9, 9]}, "names a layer twice"),
        ("bamba-9b", {"attn_layer_indices": "9"}, "must be a list of layer numbers"),
        ("nemotron-h-8b", {"num_hidden_layers": 50}, r"hybrid_override_pattern has 52 entries, .* is 50"),
        ("nemotron-h-8b", {"hybrid_override_pattern": "MX"}, "must be of the letters"),
        ("mimo-v2-flash", {"hybrid_layer_pattern": [0, 2]}, "must be a list of 0 and 1"),
        ("kimi-linear-48b-a3b", {"num_hidden_layers": 28}, "do not share out num_hidden_layers = 28 layers"),
        ("granite-4.0-h-micro", {"layer_types": None}, "none of the keys layer_types, layers_block_type"),
        ("lfm2-8b-a1b", {"layer_types": ["conv", "sonnet"] * 12}, "the layer pattern has 'sonnet'"),
        ("gpt-oss-20b", {"layer_types": ["mamba"] * 24}, "which this model_type has none of"),
        ("recurrentgemma-2b", {"_block_types": []}, "_block_types must not be empty"),
        ("zamba2-7b", {"mamba_headdim": 63}, "7168 Mamba channels are not a multiple of the head size 63"),
        ("lfm2-1.2b", {"conv_L_cache": 1}, "conv_L_cache = 1"),
    ],
)
def test_contradictions_are_named(name: str, change: dict[str, object], message: str) -> None:
    with pytest.raises(JaxkvError, match=message):
        model_cache_from_config(read(name) | change)


def test_an_unknown_architecture_names_the_keys_that_were_looked_for() -> None:
    config = {"model_type": "newmodel", "layer_types": ["full_attention"], "num_hidden_layers": 1}
    with pytest.raises(JaxkvError) as error:
        model_cache_from_config(config)
    for part in (
        "'newmodel'",
        "model_type",
        "architectures",
        "attn_type_list",
        "the file has layer_types",
        "--layers",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize("name", [name for name in sorted(PUBLISHED) if read(name).get("architectures")])
def test_a_file_without_model_type_is_known_by_its_class(name: str) -> None:
    config = read(name)
    whole = model_cache_from_config(config, name)
    without = {key: value for key, value in config.items() if key != "model_type"}
    assert model_cache_from_config(without, name).layers == whole.layers


def test_classes_of_files_that_name_none_are_known() -> None:
    """The classes are transformers' for these model types."""
    for name, architecture in (("lfm3-1.7b", "Lfm3ForCausalLM"), ("lara-4-mini", "LaraMiniForCausalLM")):
        config = read(name)
        whole = model_cache_from_config(config, name)
        del config["model_type"]
        assert (
            model_cache_from_config({**config, "architectures": [architecture]}, name).layers == whole.layers
        )
