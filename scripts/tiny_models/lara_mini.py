"""Lara-mini: gated DeltaNet, sliding and full layers by turns, all with experts."""

from typing import Any

from scripts.tiny_models.drawn import Drawn, convolution, gated_mlp, log_decay, norm, step_bias
from scripts.tiny_models.vocabulary import CONFIG

NUM_LAYERS = 6
PATTERN = ("linear_attention", "sliding_attention", "full_attention")


def config(num_layers: int) -> dict[str, Any]:
    return CONFIG | {
        "architectures": ["LaraMiniForCausalLM"],
        "model_type": "lara_mini",
        "hidden_size": 64,
        "num_hidden_layers": num_layers,
        "layer_types": [PATTERN[i % len(PATTERN)] for i in range(num_layers)],
        "sliding_window": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"},
        "tie_word_embeddings": True,
        "max_position_embeddings": 4096,
    }


def tensors(config: dict[str, Any]) -> dict[str, Drawn]:
    hidden = config["hidden_size"]
    drawn = {
        "model.embed_tokens.weight": Drawn((config["vocab_size"], hidden)),
        "model.norm.weight": norm(hidden),
    }
    for index, kind in enumerate(config["layer_types"]):
        layer = f"model.layers.{index}"
        drawn |= {
            f"{layer}.input_layernorm.weight": norm(hidden),
            f"{layer}.post_attention_layernorm.weight": norm(hidden),
            **(_delta_net if kind == "linear_attention" else _attention)(layer, config),
            **_experts(f"{layer}.mlp", config),
        }
    return drawn


def _attention(layer: str, config: dict[str, Any]) -> dict[str, Drawn]:
    hidden, head = config["hidden_size"], config["head_dim"]
    q_size, kv_size = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    return {
        f"{layer}.self_attn.q_proj.weight": Drawn((q_size, hidden)),
        f"{layer}.self_attn.k_proj.weight": Drawn((kv_size, hidden)),
        f"{layer}.self_attn.v_proj.weight": Drawn((kv_size, hidden)),
        f"{layer}.self_attn.o_proj.weight": Drawn((hidden, q_size)),
        f"{layer}.self_attn.q_norm.weight": norm(head),
        f"{layer}.self_attn.k_norm.weight": norm(head),
    }


def _delta_net(layer: str, config: dict[str, Any]) -> dict[str, Drawn]:
    hidden, num_heads = config["hidden_size"], config["linear_num_value_heads"]
    k_size = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    v_size = num_heads * config["linear_value_head_dim"]
    return {
        f"{layer}.linear_attn.in_proj.weight": Drawn((2 * k_size + 2 * v_size + 2 * num_heads, hidden)),
        f"{layer}.linear_attn.conv1d.weight": convolution(
            2 * k_size + v_size, config["linear_conv_kernel_dim"]
        ),
        f"{layer}.linear_attn.dt_bias": step_bias(num_heads),
        f"{layer}.linear_attn.A_log": log_decay(num_heads),
        f"{layer}.linear_attn.out_norm.weight": norm(config["linear_value_head_dim"]),
        f"{layer}.linear_attn.out_proj.weight": Drawn((hidden, v_size)),
    }


def _experts(name: str, config: dict[str, Any]) -> dict[str, Drawn]:
    hidden, num_experts, inner = config["hidden_size"], config["num_experts"], config["moe_intermediate_size"]
    return {
        f"{name}.gate.weight": Drawn((num_experts, hidden)),
        f"{name}.experts.gate_up_proj": Drawn((num_experts, 2 * inner, hidden)),
        f"{name}.experts.down_proj": Drawn((num_experts, hidden, inner)),
        **gated_mlp(f"{name}.shared_expert", hidden, config["shared_expert_intermediate_size"]),
    }
