"""The sizes of recurrent states, as the families' config files spell them.

Shapes follow the models' published code: a convolution keeps the last kernel - 1 inputs of every channel;
Mamba 1 and 2 a state of (channels or heads x head size) x state size; gated DeltaNet, Kimi delta attention
and linear attention a matrix for each head; the RG-LRU one number a channel.
"""

from collections.abc import Callable

from jaxkv.errors import JaxkvError
from jaxkv.model_config.layer_caches import StateCache, StateTensor
from jaxkv.model_config.text_config import TextConfig

StateReader = Callable[[TextConfig], StateCache]


def _conv(kernel: int, split: int, num_groups: int = 0, group_size: int = 0) -> StateTensor:
    return StateTensor("conv", split, (kernel - 1,), num_groups, group_size)


def mamba1(config: TextConfig) -> StateCache:
    """Jamba, Phi-4-mini-flash: one state row a channel."""
    channels = config.integer("hidden_size") * config.integer("mamba_expand")
    kernel = config.integer("mamba_d_conv", at_least=2)
    state = StateTensor("state", channels, (config.integer("mamba_d_state"),))
    return StateCache(tensors=(_conv(kernel, channels), state))


def mamba2(config: TextConfig) -> StateCache:
    """Bamba, Codestral Mamba, Falcon-H1, Granite 4, Nemotron-H, Zamba2: B and C come by groups of heads."""
    head_size = config.integer("mamba_d_head", "mamba_head_dim", "mamba_headdim", "head_dim")
    num_heads = config.optional_integer("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads")
    if num_heads is None:
        expand = config.integer("mamba_expand", "expansion_factor", "expand")
        channels = expand * config.integer("hidden_size")
        if channels % head_size:
            raise JaxkvError(f"{channels} Mamba channels are not a multiple of the head size {head_size}")
        num_heads = channels // head_size
    state_size = config.integer("mamba_d_state", "ssm_state_size", "state_size", "mamba_state_dim")
    kernel = config.integer("mamba_d_conv", "conv_kernel", "conv_dimension", at_least=2)
    num_groups = config.integer("mamba_n_groups", "mamba_ngroups", "n_groups", "mamba_num_groups")
    conv = _conv(kernel, num_heads * head_size, num_groups, 2 * state_size)
    return StateCache(tensors=(conv, StateTensor("state", num_heads, (head_size, state_size))))


def gated_delta_net(config: TextConfig) -> StateCache:
    """Qwen3-Next, Qwen3.5, Olmo Hybrid, Lara: a key x value matrix for each value head."""
    key_heads, key_size = config.integer("linear_num_key_heads"), config.integer("linear_key_head_dim")
    heads, value_size = config.integer("linear_num_value_heads"), config.integer("linear_value_head_dim")
    kernel = config.integer("linear_conv_kernel_dim", at_least=2)
    keys = 2 * key_heads * key_size
    state = StateTensor("state", heads, (value_size, key_size))
    return StateCache(tensors=(_conv(kernel, keys + heads * value_size), state))


def kimi_delta(config: TextConfig) -> StateCache:
    """Kimi Linear, Ling 3: convolutions over q, k and v, and a square matrix for each head."""
    if config.get("linear_attn_config") is not None:
        part = config.part("linear_attn_config")
        heads, size = part.integer("num_heads"), part.integer("head_dim")
        kernel = part.integer("short_conv_kernel_size", at_least=2)
    else:
        heads, size = config.integer("linear_num_heads"), config.integer("linear_head_dim")
        kernel = config.integer("short_conv_kernel_size", at_least=2)
    return StateCache(tensors=(_conv(kernel, 3 * heads * size), StateTensor("state", heads, (size, size))))


def lightning(config: TextConfig) -> StateCache:
    """MiniMax-Text-01: linear attention without a convolution."""
    size = config.integer("head_dim")
    return StateCache(tensors=(StateTensor("state", config.integer("num_attention_heads"), (size, size)),))


def short_conv(config: TextConfig) -> StateCache:
    """LFM2 and LFM3: a gated convolution over the hidden state and nothing else."""
    kernel = config.integer("conv_L_cache", at_least=2)
    return StateCache(tensors=(_conv(kernel, config.integer("hidden_size")),))


def rg_lru(config: TextConfig) -> StateCache:
    """RecurrentGemma: a convolution and one number a channel."""
    width = config.integer("lru_width", "hidden_size")
    kernel = config.integer("conv1d_width", at_least=2)
    return StateCache(tensors=(_conv(kernel, width), StateTensor("state", width, ())))


def four_short_convs(config: TextConfig) -> StateCache:
    """Inkling 2: convolutions over keys and values, and over the hidden state before and after attention."""
    kernel = config.integer("conv_kernel_size", at_least=2)
    keys = config.integer("num_key_value_heads") * config.integer("head_dim")
    return StateCache(tensors=(_conv(kernel, 2 * keys + 2 * config.integer("hidden_size")),))


def key_value_conv(num_kv_heads: int, head_size: int, window: int) -> StateCache:
    """Baichuan-M1: the last window - 1 keys and values before their convolution."""
    return StateCache(tensors=(_conv(window, 2 * num_kv_heads * head_size),))
