"""The sizes of attention caches, as the families' config files spell them."""

from collections.abc import Callable

from jaxkv.errors import JaxkvError
from jaxkv.model_config.layer_caches import AttentionCache, LatentCache
from jaxkv.model_config.text_config import TextConfig

KINDS = {
    "full_attention": "full",
    "sliding_attention": "sliding_window",
    "chunked_attention": "chunked_local",
}
"""The kind of cache of each word for attention."""

AttentionReader = Callable[[TextConfig, str], AttentionCache | LatentCache]
"""(config, kind) to what an attention layer of that kind keeps."""


def grouped_query(config: TextConfig, kind: str) -> AttentionCache:
    """The common spelling: num_attention_heads, num_key_value_heads, head_dim or hidden_size / heads."""
    num_heads = config.integer("num_attention_heads")
    head_size = config.optional_integer("head_dim", "attention_head_dim") or _share(config, num_heads)
    return AttentionCache(
        kind=kind,
        num_heads=num_heads,
        num_kv_heads=config.optional_integer("num_key_value_heads") or num_heads,
        head_size=head_size,
        head_size_v=config.optional_integer("v_head_dim") or head_size,
        reach=_reach(config, kind),
    )


def sliding_heads_of_their_own(config: TextConfig, kind: str) -> AttentionCache:
    """Sliding layers with `swa_` keys beside the common ones (MiMo, Inkling)."""
    common = grouped_query(config, kind)
    if kind != "sliding_window":
        return common
    head_size = config.optional_integer("swa_head_dim") or common.head_size
    return AttentionCache(
        kind=kind,
        num_heads=config.optional_integer("swa_num_attention_heads") or common.num_heads,
        num_kv_heads=config.optional_integer("swa_num_key_value_heads") or common.num_kv_heads,
        head_size=head_size,
        head_size_v=config.optional_integer("swa_v_head_dim", "swa_head_dim") or head_size,
        reach=common.reach,
    )


def gemma4(config: TextConfig, kind: str) -> AttentionCache:
    """Full layers have a head size of their own and, where keys are also values, a number of KV heads."""
    common = grouped_query(config, kind)
    if kind != "full":
        return common
    own_heads = config.get("attention_k_eq_v") is True
    heads = config.optional_integer("num_global_key_value_heads") if own_heads else None
    head_size = config.optional_integer("global_head_dim") or common.head_size
    return AttentionCache(
        kind=kind,
        num_heads=common.num_heads,
        num_kv_heads=heads or common.num_kv_heads,
        head_size=head_size,
        head_size_v=head_size,
    )


def baichuan_m1(config: TextConfig, kind: str) -> AttentionCache:
    """Sliding layers have `num_swa_` heads; the head size is hidden_size / heads of that kind."""
    sliding = kind == "sliding_window"
    num_heads = config.integer("num_swa_attention_heads" if sliding else "num_attention_heads")
    head_size = _share(config, num_heads)
    return AttentionCache(
        kind=kind,
        num_heads=num_heads,
        num_kv_heads=config.integer("num_swa_key_value_heads" if sliding else "num_key_value_heads"),
        head_size=head_size,
        head_size_v=head_size,
        reach=_reach(config, kind),
    )


def zamba2(config: TextConfig, kind: str) -> AttentionCache:
    """Attention over hidden state and embedding side by side: heads twice as wide as usual."""
    num_heads = config.integer("num_attention_heads")
    head_size = config.optional_integer("attention_head_dim") or 2 * _share(config, num_heads)
    return AttentionCache(
        kind=kind,
        num_heads=num_heads,
        num_kv_heads=config.optional_integer("num_key_value_heads") or num_heads,
        head_size=head_size,
        head_size_v=head_size,
    )


def latent(config: TextConfig, kind: str) -> LatentCache:
    """MLA: the compressed keys and values, and the part of the key that carries positions."""
    rope = config.integer("qk_rope_head_dim", at_least=0)
    return LatentCache(width=config.integer("kv_lora_rank") + rope)


def _share(config: TextConfig, num_heads: int) -> int:
    hidden = config.integer("hidden_size")
    if hidden % num_heads:
        raise JaxkvError(f"hidden_size {hidden} is not a multiple of num_attention_heads {num_heads}")
    return hidden // num_heads


def _reach(config: TextConfig, kind: str) -> int | None:
    if kind == "sliding_window":
        return config.integer("sliding_window", "sliding_window_size", "attention_window_size")
    return config.integer("attention_chunk_size") if kind == "chunked_local" else None
