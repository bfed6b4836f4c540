"""Jamba: of three layers one attends and two are Mamba 1; every second has experts, so all pairs occur."""

from typing import Any

from scripts.tiny_models.drawn import Drawn, convolution, gated_mlp, log_decay, norm, step_bias
from scripts.tiny_models.vocabulary import CONFIG

NUM_LAYERS = 6


def config(num_layers: int) -> dict[str, Any]:
    return CONFIG | {
        "architectures": ["JambaForCausalLM"],
        "model_type": "jamba",
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mamba_conv_bias": True,
        "mamba_d_conv": 4,
        "mamba_d_state": 8,
        "mamba_dt_rank": 6,
        "mamba_expand": 2,
        "mamba_proj_bias": False,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
    }


def tensors(config: dict[str, Any]) -> dict[str, Drawn]:
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    drawn = {
        "model.embed_tokens.weight": Drawn((vocabulary, hidden), deviation=1.0),
        "model.final_layernorm.weight": norm(hidden),
        "lm_head.weight": Drawn((vocabulary, hidden)),
    }
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        attends = index % config["attn_layer_period"] == config["attn_layer_offset"]
        has_experts = index % config["expert_layer_period"] == config["expert_layer_offset"]
        drawn |= {
            f"{layer}.input_layernorm.weight": norm(hidden),
            f"{layer}.pre_ff_layernorm.weight": norm(hidden),
            **(_attention if attends else _mamba)(layer, config),
            **(_experts if has_experts else _mlp)(f"{layer}.feed_forward", config),
        }
    return drawn


def _attention(layer: str, config: dict[str, Any]) -> dict[str, Drawn]:
    hidden = config["hidden_size"]
    kv_size = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    return {
        f"{layer}.self_attn.q_proj.weight": Drawn((hidden, hidden)),
        f"{layer}.self_attn.k_proj.weight": Drawn((kv_size, hidden)),
        f"{layer}.self_attn.v_proj.weight": Drawn((kv_size, hidden)),
        f"{layer}.self_attn.o_proj.weight": Drawn((hidden, hidden)),
    }


def _mamba(layer: str, config: dict[str, Any]) -> dict[str, Drawn]:
    hidden, state, rank = config["hidden_size"], config["mamba_d_state"], config["mamba_dt_rank"]
    channels = config["mamba_expand"] * hidden
    return {
        f"{layer}.mamba.in_proj.weight": Drawn((2 * channels, hidden)),
        f"{layer}.mamba.conv1d.weight": convolution(channels, config["mamba_d_conv"]),
        f"{layer}.mamba.conv1d.bias": Drawn((channels,)),
        f"{layer}.mamba.x_proj.weight": Drawn((rank + 2 * state, channels)),
        f"{layer}.mamba.dt_layernorm.weight": norm(rank),
        f"{layer}.mamba.b_layernorm.weight": norm(state),
        f"{layer}.mamba.c_layernorm.weight": norm(state),
        f"{layer}.mamba.dt_proj.weight": Drawn((channels, rank)),
        f"{layer}.mamba.dt_proj.bias": step_bias(channels),
        f"{layer}.mamba.A_log": log_decay(channels, state),
        f"{layer}.mamba.D": norm(channels),
        f"{layer}.mamba.out_proj.weight": Drawn((hidden, channels)),
    }


def _mlp(name: str, config: dict[str, Any]) -> dict[str, Drawn]:
    return gated_mlp(name, config["hidden_size"], config["intermediate_size"])


def _experts(name: str, config: dict[str, Any]) -> dict[str, Drawn]:
    drawn = {f"{name}.router.weight": Drawn((config["num_experts"], config["hidden_size"]))}
    for expert in range(config["num_experts"]):
        drawn |= _mlp(f"{name}.experts.{expert}", config)
    return drawn
